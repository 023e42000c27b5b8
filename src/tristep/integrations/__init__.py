"""tristep in other training libraries, a module for each: `huggingface` and `lightning`.

`import tristep` imports none of them. docs/integrations.md has examples, also for libraries that need no module here.
"""
