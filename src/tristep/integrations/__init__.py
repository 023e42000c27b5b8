"""tristep in other training libraries, a thin file for each: `huggingface`, `lightning`, `dcp` and `torchtitan`.

`import tristep` imports none of them. docs/integrations.md shows what to write, also for libraries that need no file here.
"""
