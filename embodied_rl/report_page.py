"""The look of a report: the page's skeleton, style sheet and script. Nothing in it is loaded from elsewhere.

Colours are CSS variables with a light and a dark set, so charts follow the reader's system setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_LIGHT = """--ground:#f7f7f5;--surface:#ffffff;--ink:#1c1e23;--soft:#666b76;--hair:#e4e4e0;--fill:#f1f1ee;
--s1:#2563c9;--s2:#c8601a;--s3:#0c8467;--s4:#7a52c7;
--e1:#3b78d8;--e2:#e0893a;--e3:#2a9d85;--e4:#9a75d6;--e5:#d2607f;--e6:#8a9a3a;--e7:#4aa3c4;--e0:#a5a9b2;
--good:#0c8467;--bad:#c23b4e;--wait:#c9c9c3;"""
_DARK = """--ground:#121316;--surface:#1a1c20;--ink:#e9eaec;--soft:#9a9fa9;--hair:#2b2e34;--fill:#23262b;
--s1:#6ea2f5;--s2:#f0975a;--s3:#4cc3a2;--s4:#b295f2;
--e1:#5b93e8;--e2:#e59a55;--e3:#43b39b;--e4:#a98be0;--e5:#dd7a96;--e6:#a3b251;--e7:#62b4d3;--e0:#6f747e;
--good:#4cc3a2;--bad:#f07a88;--wait:#484c54;"""
_FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'

_CHART = f"""text{{font:11px {_FONT};font-variant-numeric:tabular-nums;fill:var(--soft)}}
.grid{{stroke:var(--hair);stroke-width:1}}.axis{{stroke:var(--soft);stroke-width:1;opacity:.45}}
.line,.raw{{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}}.raw{{stroke-width:1;opacity:.32}}
.s1{{stroke:var(--s1);--c:var(--s1)}}.s2{{stroke:var(--s2);--c:var(--s2)}}
.s3{{stroke:var(--s3);--c:var(--s3)}}.s4{{stroke:var(--s4);--c:var(--s4)}}
.point{{fill:var(--surface);stroke-width:2}}.whisker{{stroke-width:1.5;opacity:.4}}"""

_STYLE = """*{box-sizing:border-box}html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.55 FONT;
font-variant-numeric:tabular-nums}
main{max-width:1140px;margin:0 auto;padding:44px 24px 72px}
h1{font-size:28px;line-height:1.2;font-weight:650;letter-spacing:-.015em;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;font-weight:620;letter-spacing:-.005em;margin:48px 0 14px}
h3{font-size:14px;font-weight:600;margin:0}p{margin:0}a{color:var(--s1)}
.over{color:var(--soft);font-size:13px;margin-bottom:6px}
.facts{display:flex;flex-wrap:wrap;gap:4px 22px;margin-top:12px;color:var(--soft);font-size:14px}
.status{display:inline-flex;align-items:center;gap:8px;color:var(--ink)}
.status::before{content:"";width:9px;height:9px;border-radius:50%;background:var(--s2)}
.status.done::before{background:var(--good)}
.note{color:var(--soft);font-size:14px;margin:0 0 12px;max-width:76ch}
.card,.tile{background:var(--surface);border:1px solid var(--hair);border-radius:10px}
.card{padding:16px 18px;min-width:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:14px;margin-top:28px}
.tile{padding:16px 18px}.tile span{display:block;font-size:13px;color:var(--soft)}
.tile strong{display:block;font-size:30px;line-height:1.25;font-weight:620;letter-spacing:-.02em;
margin:2px 0}
.tile strong small{font-size:17px;font-weight:500;letter-spacing:0;color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(330px,100%),1fr));gap:14px}
.charts .wide{grid-column:1/-1}
.head{display:flex;justify-content:space-between;align-items:baseline;gap:12px;margin-bottom:8px}
.head .now{font-size:14px;color:var(--soft);white-space:nowrap}
.head .now b{color:var(--ink);font-weight:600}
.chart{display:block;width:100%;height:auto;overflow:visible;touch-action:pan-y}.medium,.narrow{display:none}
.cursor{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}
.dot{fill:var(--c);stroke:var(--surface);stroke-width:1.5}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--soft);margin-bottom:8px}
.key{display:inline-flex;align-items:center;gap:7px}
.key i{width:11px;height:11px;border-radius:3px;background:var(--c)}
.key i.ring{border-radius:50%;background:none;border:2px solid var(--c)}.key i.dash{height:3px;width:15px}
.key i.hollow{background:none;border:1.5px solid var(--bad)}
table{border-collapse:collapse;font-size:14px;width:100%}
th,td{padding:7px 14px 7px 0;border-bottom:1px solid var(--hair);text-align:right;vertical-align:top}
th{font-weight:500;color:var(--soft);white-space:nowrap}tbody tr:last-child>*{border-bottom:0}
th:first-child,td:first-child{text-align:left}td:last-child,th:last-child{padding-right:0}
.pair td{text-align:right;overflow-wrap:anywhere}
.two{display:grid;grid-template-columns:3fr 2fr;gap:14px;align-items:start}
.strip{display:flex;flex-wrap:wrap;gap:4px;margin:4px 0 6px}
.strip i{width:13px;height:13px;border-radius:3px;border:1.5px solid var(--bad)}
.strip i.yes{background:var(--good);border-color:var(--good)}
.scroll{overflow:auto;max-height:420px}.scroll thead th{position:sticky;top:0;background:var(--surface)}
.videos{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(240px,100%),1fr));gap:14px}
.videos video{display:block;width:100%;border-radius:6px;background:#000}.videos .card{padding:10px}
.videos p{font-size:13px;color:var(--soft);margin-top:8px;overflow-wrap:anywhere}
.bar{display:grid;grid-template-columns:110px 1fr;gap:14px;align-items:center;margin:9px 0;font-size:14px}
.bar>div{display:flex;gap:2px;height:26px}
.bar b{display:block;font-weight:500;font-size:12.5px;line-height:26px;
padding:0 8px;border-radius:4px;background:var(--c);color:var(--on,#fff);overflow:hidden;
white-space:nowrap;min-width:2px}
.bar b{text-overflow:ellipsis}
.bar b.rest{background:var(--fill);color:var(--soft)}.bar b.slim{padding:0;text-indent:-99em}
.timeline{overflow-x:auto}
.row{display:grid;grid-template-columns:110px minmax(420px,1fr);gap:14px;align-items:center;margin:5px 0}
.who{font-size:13px;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;position:sticky;left:0;
background:var(--surface);
z-index:1}.track{position:relative;background:var(--fill);border-radius:4px;overflow:hidden}
.track b{position:absolute;background:var(--c);min-width:1px;border-right:1px solid var(--surface);
display:flex;align-items:center;
padding-left:5px;font-size:11px;font-weight:500;line-height:1;color:var(--on,#fff);overflow:hidden;
white-space:nowrap}
.track b:empty{padding:0}.track b.mark{color:var(--soft)}
.track b:hover{filter:brightness(1.18)}
.scale{position:relative;height:20px;font-size:12px;color:var(--soft);margin-right:2px}
.scale span{position:absolute;
transform:translateX(-50%);white-space:nowrap}.scale span:first-child{transform:none}
.wait{--c:repeating-linear-gradient(135deg,var(--wait) 0 2px,transparent 2px 5px)}.mark{--c:var(--hair)}
.e1{--c:var(--e1)}.e2{--c:var(--e2)}.e3{--c:var(--e3)}.e4{--c:var(--e4)}.e5{--c:var(--e5)}.e6{--c:var(--e6)}
.e7{--c:var(--e7)}.e0{--c:var(--e0)}
details summary{cursor:pointer;font-size:14px;color:var(--soft)}details[open] summary{margin-bottom:12px}
details.card{margin-top:14px}
pre{margin:0;font:13px/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
overflow-x:auto;
white-space:pre}
#tip{position:fixed;z-index:9;pointer-events:none;background:var(--ink);color:var(--ground);
font-size:12.5px;line-height:1.45;
padding:7px 10px;border-radius:6px;white-space:pre;max-width:90vw;overflow:hidden;text-overflow:ellipsis;
display:none}
footer{margin-top:56px;color:var(--soft);font-size:13px}
@media (max-width:960px){.tiles{grid-template-columns:1fr 1fr}.broad{display:none}.medium{display:block}}
@media (max-width:700px){main{padding:26px 14px 48px}h1{font-size:23px}h2{margin-top:38px}
.two{grid-template-columns:1fr}
.medium{display:none}.narrow{display:block}.tiles{grid-template-columns:1fr 1fr;gap:10px}
.tile{padding:12px 13px}
.tile strong{font-size:23px}.tile strong small{font-size:14px}.bar{grid-template-columns:70px 1fr;gap:10px}
.row{grid-template-columns:80px minmax(420px,1fr);gap:10px}}
@media (prefers-color-scheme:dark){.bar b,.track b{--on:#101114}}
@media print{body{background:#fff}.card,.tile{break-inside:avoid}}""".replace("FONT", _FONT)

_SCRIPT = """(()=>{
const tip=document.getElementById('tip');
const show=(text,x,y)=>{tip.textContent=text;tip.style.display='block';
 const w=tip.offsetWidth,h=tip.offsetHeight;
 tip.style.left=Math.max(6,x+16+w>innerWidth-6?x-w-14:x+16)+'px';
 tip.style.top=Math.max(6,y+18+h>innerHeight-6?y-h-12:y+18)+'px'};
const hide=()=>{tip.style.display='none'};
const make=(svg,name,attributes)=>{const node=document.createElementNS('http://www.w3.org/2000/svg',name);
 for(const key in attributes)node.setAttribute(key,attributes[key]);svg.append(node);return node};
for(const svg of document.querySelectorAll('svg[data-hover]')){
 const data=JSON.parse(svg.dataset.hover);let drawn=[];
 const clear=()=>{drawn.forEach(node=>node.remove());drawn=[]};
 svg.addEventListener('pointermove',event=>{
  const box=svg.getBoundingClientRect(),x=(event.clientX-box.left)/box.width*svg.viewBox.baseVal.width;
  let best=0;for(let i=1;i<data.x.length;i++)if(Math.abs(data.x[i]-x)<Math.abs(data.x[best]-x))best=i;
  clear();
  drawn.push(make(svg,'line',{class:'cursor',x1:data.x[best],x2:data.x[best],y1:data.top,y2:data.bottom}));
  let text=data.label[best];
  for(const one of data.series)if(one.y[best]!==null){
   drawn.push(make(svg,'circle',{class:'dot '+one.colour,cx:data.x[best],cy:one.y[best],r:4}));
   text+='\\n'+one.name+'  '+one.text[best]}
  show(text,event.clientX,event.clientY)});
 svg.addEventListener('pointerleave',()=>{clear();hide()})}
document.addEventListener('pointerover',event=>{
 const at=event.target.closest&&event.target.closest('[data-tip]');
 if(at){const move=e=>show(at.dataset.tip,e.clientX,e.clientY);move(event);
  at.addEventListener('pointermove',move);
  at.addEventListener('pointerleave',()=>{at.removeEventListener('pointermove',move);hide()},{once:true})}})
})()"""

STANDALONE_CHART_STYLE = (
    f"svg{{{_LIGHT}}}@media (prefers-color-scheme:dark){{svg{{{_DARK}}}}}"
    f".background{{fill:var(--surface)}}{_CHART}.title{{fill:var(--ink);font-size:14px;font-weight:600}}"
).replace("\n", "")


def page(title: str, header: str, sections: Sequence[tuple[str, str]]) -> str:
    """A whole HTML document: the header's markup, then each section's title (plain text) and markup."""
    body = "".join(f"<section><h2>{escape(name)}</h2>{markup}</section>" for name, markup in sections if markup)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>:root{{color-scheme:light dark;{_LIGHT}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}{_CHART}{_STYLE}</style></head>"
        f"<body><main>{header}{body}"
        "<footer>Written by embodied-rl. This file needs no network.</footer></main>"
        f'<div id="tip" role="status"></div><script>{_SCRIPT}</script></body></html>\n'
    )
