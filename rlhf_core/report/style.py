"""The style of the HTML page; colours after Okabe and Ito, lighter on dark ground."""

_LIGHT = """
  --paper: #ffffff; --card: #f6f7f9; --ink: #1d2024; --muted: #5c636b; --line: #d9dce1;
  --blue: #0072b2; --vermilion: #b84a00; --green: #00704f; --gone: #fbdccb; --come: #cdeee0;
"""
_DARK = """
  --paper: #14161a; --card: #1d2025; --ink: #e4e6ea; --muted: #9aa2ad; --line: #363b44;
  --blue: #5cb8ec; --vermilion: #f0904a; --green: #3fc79a; --gone: #57301c; --come: #14463a;
"""

STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ margin: 0 0 .75rem; font-size: 1.4rem; }}
h2 {{ margin: 2rem 0 .6rem; font-size: 1.1rem; }}
h3 {{ margin: 0; font-size: .8rem; font-weight: 600; color: var(--muted); }}
p {{ margin: 0; }}
ul {{ margin: .3rem 0 0; padding-left: 1.2rem; }}
a {{ color: var(--blue); }}
code, pre {{ font: .85rem/1.45 ui-monospace, monospace; }}
.muted, figcaption {{ color: var(--muted); font-size: .85rem; }}
.reading {{ margin: -.3rem 0 .6rem; }}

.decision {{ padding: .9rem 1.1rem; border-left: .4rem solid var(--tone); background: var(--card); }}
.decision .said {{ font-size: 1.15rem; }}
.decision strong {{ color: var(--tone); }}
.good, .passed {{ --tone: var(--green); }}
.bad, .failed {{ --tone: var(--vermilion); }}

.cards {{ display: grid; gap: .75rem; grid-template-columns: 
  repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }}
.card, figure, article, details {{ padding: .8rem 1rem; border: 1px solid var(--line); border-radius: .4rem;
  background: var(--card); }}
.value {{ font-size: 1.5rem; font-variant-numeric: tabular-nums; }}
.whiskers {{ display: block; width: 100%; max-width: 22rem; --tone: var(--blue); }}
.whiskers.passed {{ --tone: var(--green); }}
.whiskers.failed {{ --tone: var(--vermilion); }}
.whiskers circle {{ fill: var(--tone); }}
.whiskers .range {{ stroke: var(--tone); stroke-width: 3; stroke-linecap: round; }}
.whiskers .bound {{ stroke: var(--ink); stroke-dasharray: 3 2; }}
.whiskers .allowed {{ fill: var(--green); opacity: .16; }}

table {{ width: 100%; border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }}
th {{ color: var(--muted); font-weight: 600; text-align: left; overflow-wrap: normal; }}
th, td {{ padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: middle; }}
.gates td:nth-child(4) {{ width: 14rem; }}
.numbers td:first-child {{ width: 55%; }}
.monitors td:nth-child(-n+2) {{ white-space: nowrap; }}
.monitors td:nth-child(3) {{ min-width: 7rem; }}
.stages td:nth-child(2) {{ min-width: 9rem; }}
.result {{ color: var(--tone); font-weight: 600; }}
.bar {{ display: inline-block; height: .7rem; background: var(--blue); vertical-align: baseline; }}

.plots {{ display: grid; gap: .75rem; grid-template-columns: 
  repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); }}
figure {{ margin: 0; }}
figure svg {{ display: block; width: 100%; height: auto; stroke-linejoin: round; }}
figcaption {{ margin-top: .5rem; }}
figcaption strong {{ color: var(--ink); }}

.samples {{ display: grid; gap: .75rem; }}
article {{ display: grid; gap: .5rem 1.2rem; grid-template-columns: 1fr 1fr; }}
article .prompt {{ grid-column: 1 / -1; font-weight: 600; }}
article p {{ white-space: pre-wrap; unicode-bidi: isolate; }}
ins, del {{ text-decoration: none; border-radius: .2rem; box-decoration-break: clone; }}
ins {{ background: var(--come); }}
del {{ background: var(--gone); }}
.tokens {{ grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); }}
.tokens span {{ background: color-mix(in srgb, var(--tone) calc(var(--share) * .6), transparent); }}
.up {{ --tone: var(--vermilion); }}
.down {{ --tone: var(--blue); }}
.rollouts td:nth-child(2) {{ width: 22%; }}
.rollouts td:nth-child(3) {{ width: 45%; white-space: pre-wrap; }}
details {{ margin-top: 2rem; }}
summary {{ cursor: pointer; font-weight: 600; }}
pre {{ overflow-x: auto; }}

@media screen and (max-width: 40rem) {{
  article {{ grid-template-columns: 1fr; }}
  table, tbody, tr, td {{ display: block; }}
  thead {{ display: none; }}
  tr {{ padding: .5rem 0; border-bottom: 1px solid var(--line); }}
  td {{ padding: .1rem 0; border: 0; width: auto !important; }}
  td:not(:first-child)::before {{ content: attr(data-label) ": "; color: var(--muted); }}
  td:first-child {{ font-weight: 600; }}
  td:empty {{ display: none; }}
}}
@media print {{
  :root {{ color-scheme: light; {_LIGHT} }}
  * {{ print-color-adjust: exact; }}
  body {{ padding: 0; font-size: 10pt; }}
  .card, figure, article, tr {{ break-inside: avoid; }}
  h2 {{ break-after: avoid; }}
  .plots {{ grid-template-columns: 1fr 1fr; }}
  .cards {{ grid-template-columns: repeat(3, 1fr); }}
}}
"""
