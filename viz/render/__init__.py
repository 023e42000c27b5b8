"""Renderers of scenes: matplotlib, a canvas in the browser, ipywidgets, and text."""
