"""Rows: what a job does with one row of its table.

`definition` is what the job asks for, `render` makes a request of it and a row, `judge` makes a verdict of the answer,
`call` does all three through an HttpProcessor. Rendering and judging are pure functions.
"""
