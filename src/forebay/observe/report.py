"""The pieces of a report: one HTML file that needs nothing else, now or in ten years.

Covers: line and bar figures, tables, tiles, and the page that holds them, with
plotly's script inside it. Does not cover: which figure tells what (each page of
its own: demo_page.py).

The one idea: colours are words. A figure says `var(--forebay)`, the style sheet
says what that is by day and by night, and a short script fills it in when the
page is drawn and again when the reader's system changes from light to dark.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, TypeAlias

from forebay.errors import ForebayError

FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


class PlotlyMissing(ForebayError, ImportError):  # noqa: N818 - named for what it is about
    """A figure was asked for, and plotly is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "Reports are drawn by plotly, which is not installed. No report was written. "
            'Install it with: pip install "forebay[demo]"'
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a figure. `colour` is a word of the style sheet, such as `--forebay`."""

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    dash: str = "solid"
    width: float = 2.25


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line across a figure, with its name written on it."""

    name: str
    colour: str
    y: float


@dataclass(frozen=True, slots=True)
class Band:
    """A shaded range of y."""

    colour: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Moment:
    """A point where something happened, marked with a cross and its name."""

    name: str
    colour: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Bars:
    """One part of every stacked bar; as many values as the figure has bars."""

    name: str
    colour: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Tile:
    """One number to be seen first."""

    value: str
    label: str
    colour: str = "--ink"


@dataclass(frozen=True, slots=True)
class Text:
    """Words in a table cell or a section; escaped when the page is made."""

    words: str


@dataclass(frozen=True, slots=True)
class Html:
    """Finished HTML of our own making."""

    source: str


Cell: TypeAlias = Text | Html


def line_figure(
    curves: Iterable[Curve],
    *,
    x_title: str,
    y_title: str,
    levels: Iterable[Level] = (),
    bands: Iterable[Band] = (),
    moments: Iterable[Moment] = (),
    y_from: float = 0.0,
) -> Html:
    """Lines over one x, which starts at 0; y starts at `y_from`."""
    drawn = list(curves)
    figure = _plotly_figures().Figure()
    for curve in drawn:
        figure.add_scatter(
            x=list(curve.x),
            y=list(curve.y),
            name=curve.name,
            mode="lines",
            line={"color": f"var({curve.colour})", "width": curve.width, "dash": curve.dash},
        )
    for moment in moments:
        _add_moment(figure, moment)
    for band in bands:
        figure.add_hrect(
            y0=band.low, y1=band.high, fillcolor=f"var({band.colour})", line_width=0, layer="below"
        )
    for level in levels:
        _add_level(figure, level)
    figure.update_layout(hovermode="x unified", **_layout(x_title, y_title))
    figure.update_xaxes(range=[0, max((max(each.x, default=1) for each in drawn), default=1)])
    figure.update_yaxes(autorangeoptions={"include": y_from, "minallowed": y_from})
    return _embed(figure)


def bar_figure(names: Sequence[str], parts: Iterable[Bars], *, value_title: str) -> Html:
    """One stacked horizontal bar a name, the first on top."""
    figure = _plotly_figures().Figure()
    for part in parts:
        figure.add_bar(
            y=list(names),
            x=list(part.values),
            name=part.name,
            orientation="h",
            marker={"color": f"var({part.colour})", "line": {"width": 0}},
            hovertemplate="%{x:,.0f} MiB",
        )
    figure.update_layout(barmode="stack", bargap=0.42, **_layout(value_title, ""))
    figure.update_layout(
        height=140 + 62 * len(names),
        legend={"traceorder": "normal"},
        yaxis={"autorange": "reversed", "showgrid": False, "automargin": True},
    )
    return _embed(figure)


def _add_moment(figure: Any, moment: Moment) -> None:
    figure.add_scatter(
        x=[moment.x],
        y=[moment.y],
        name=moment.name,
        mode="markers",
        showlegend=False,
        cliponaxis=False,
        marker={
            "symbol": "x",
            "size": 13,
            "color": f"var({moment.colour})",
            "line": {"width": 2, "color": "var(--card)"},
        },
        hovertemplate=moment.name + "<extra></extra>",
    )


def _add_level(figure: Any, level: Level) -> None:
    figure.add_hline(
        y=level.y,
        line={"color": f"var({level.colour})", "width": 1.5, "dash": "dot"},
        annotation={
            "text": level.name,
            "font": {"color": f"var({level.colour})", "size": 12},
            "bgcolor": "var(--card-veil)",
            "borderpad": 1,
            "xanchor": "right",
            "yanchor": "bottom",
            "x": 1,
            "showarrow": False,
        },
    )


def _layout(x_title: str, y_title: str) -> dict[str, Any]:
    axis = {
        "gridcolor": "var(--grid)",
        "linecolor": "var(--grid)",
        "zerolinecolor": "var(--grid)",
        "tickfont": {"color": "var(--muted)"},
        "fixedrange": True,
    }
    title = {"font": {"color": "var(--muted)", "size": 12}, "standoff": 8}
    return {
        "template": "none",
        "height": 420,
        "margin": {"l": 56, "r": 12, "t": 12, "b": 48},
        "font": {"family": FONT, "size": 13, "color": "var(--ink)"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--grid)"},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        "xaxis": {**axis, "title": {"text": x_title, **title}, "showgrid": False},
        "yaxis": {**axis, "title": {"text": y_title, **title}, "nticks": 7},
    }


def _plotly_figures() -> Any:
    try:
        import plotly.graph_objects
    except ImportError:
        raise PlotlyMissing from None
    return plotly.graph_objects


def _embed(figure: Any) -> Html:
    """The figure as data in the page; report.js draws it."""
    spec = json.dumps(json.loads(figure.to_json()), separators=(",", ":")).replace("</", "<\\/")
    return Html(
        '<div class="figure"><div class="plot"></div>'
        f'<script type="application/json">{spec}</script></div>'
    )


def tiles(chosen: Iterable[Tile]) -> Html:
    """Numbers side by side, as many in a row as the screen has room for."""
    cells = (
        f'<div class="tile"><b style="color:var({tile.colour})">{html.escape(tile.value)}</b>'
        f"<span>{html.escape(tile.label)}</span></div>"
        for tile in chosen
    )
    return Html(f'<div class="tiles">{"".join(cells)}</div>')


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Html:
    """A table whose first column names the row; on a phone each row becomes a card."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    body = "".join(_row(columns, row) for row in rows)
    return Html(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _row(columns: Sequence[str], row: Sequence[Cell]) -> str:
    first, *rest = row
    cells = "".join(
        f'<td data-label="{html.escape(name, quote=True)}">{_source(cell)}</td>'
        for name, cell in zip(columns[1:], rest, strict=True)
    )
    return f'<tr><th scope="row">{_source(first)}</th>{cells}</tr>'


def _source(cell: Cell) -> str:
    return cell.source if isinstance(cell, Html) else html.escape(cell.words)


def swatch(name: str, colour: str) -> Html:
    """A name behind a dot of its colour."""
    return Html(f'<i class="dot" style="background:var({colour})"></i>{html.escape(name)}')


def marked(words: str, mood: str) -> Html:
    """Words in the colour of `mood`: "good", "bad" or "note"."""
    return Html(f'<span class="{mood}">{html.escape(words)}</span>')


def paragraphs(texts: Iterable[str]) -> Html:
    """Plain paragraphs."""
    return Html("".join(f"<p>{html.escape(text)}</p>" for text in texts))


def notes(texts: Iterable[str]) -> Html:
    """Small print under a table or a figure."""
    return Html("".join(f'<p class="note">{html.escape(text)}</p>' for text in texts))


def section(title: str, *content: Html, lead: str = "") -> Html:
    """A card with a heading."""
    intro = f'<p class="lead">{html.escape(lead)}</p>' if lead else ""
    inner = "".join(each.source for each in content)
    return Html(f"<section><h2>{html.escape(title)}</h2>{intro}{inner}</section>")


def page(title: str, headline: str, lead: str, content: Iterable[Html], footer: str) -> str:
    """The whole document; about 5 MB, nearly all of it plotly's script."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise PlotlyMissing from None
    style = _beside("report.css")
    script = _beside("report.js")
    body = "".join(each.source for each in content)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body><main>"
        f'<header><p class="brand">{html.escape(title)}</p><h1>{html.escape(headline)}</h1>'
        f'<p class="lead">{html.escape(lead)}</p></header>{body}'
        f"<footer>{html.escape(footer)}</footer></main>"
        f"<script>{get_plotlyjs()}</script><script>{script}</script></body></html>"
    )


def _beside(name: str) -> str:
    return resources.files("forebay.observe").joinpath(name).read_text(encoding="utf-8")
