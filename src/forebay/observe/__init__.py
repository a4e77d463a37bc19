"""Showing what was recorded: pages, tables, figures.

Covers: turning records into HTML (`report` holds the pieces, `demo_page` the page
of `forebay demo`). Does not cover: recording anything (flow/, bench/).

Stands beside the stairs: the engine never imports it.
"""
