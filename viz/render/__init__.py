"""What shows scenes: matplotlib, a canvas in the browser, core widgets of ipywidgets. Text is a scene's description."""
