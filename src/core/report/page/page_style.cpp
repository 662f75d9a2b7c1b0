// The look of the page: one column of cards, light or dark as the reader's system is. Colours of runs and purposes are
// those of Okabe and Ito, which colour-blind people can tell apart.
#include "report/page/html_page.h"

namespace zero::report {

const char* page_style() {
  return R"css(
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1d2129;--soft:#5b6270;--line:#dfe3ea;--grid:#eceff3;--band:#f0f2f6;
--r0:#0072b2;--r1:#d55e00;--r2:#009e73;--r3:#b2568f;--r4:#56b4e9;--r5:#a07800;--r6:#444a57;--r7:#7a5ac8;
--p0:#0072b2;--p1:#e69f00;--p2:#b2568f;--p3:#d9a4c6;--p4:#56b4e9;--p5:#d55e00;--p6:#009e73;--p7:#9aa1ad;
--fwd:#009e73;--bwd:#0072b2;--upd:#b2568f;--gat:#56b4e9;--red:#d55e00;--tie:#a07800;--wai:#8b93a1;--who:#dcebf5}
@media (prefers-color-scheme:dark){:root{--bg:#15171b;--card:#1e2127;--ink:#e7eaf0;--soft:#a2a9b6;--line:#343943;--grid:#2a2e36;--band:#262a32;
--r0:#4aa8e0;--r1:#f0803c;--r2:#2fc39a;--r3:#d98bbd;--r4:#9fd4f5;--r5:#e0b93c;--r6:#b9c0cd;--r7:#a991ee;
--p0:#2b8cc9;--p1:#e6a51e;--p2:#c46ea4;--p3:#8e5a7c;--p4:#7cc4ee;--p5:#e5702a;--p6:#20ab83;--p7:#7d8593;
--fwd:#20ab83;--bwd:#2b8cc9;--upd:#c46ea4;--gat:#7cc4ee;--red:#e5702a;--tie:#c9a53a;--wai:#7d8593;--who:#27394a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:24px;margin:0 0 2px;font-weight:650}
h2{font-size:17px;margin:0 0 2px;font-weight:650}
h3{font-size:14px;margin:14px 0 4px;font-weight:600}
p{margin:0 0 10px;color:var(--soft);max-width:78em}
p.note{margin:6px 0 0;font-size:13px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin:16px 0}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:16px;margin:16px 0}
.two>section{margin:0}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(430px,100%),1fr));gap:4px 24px}
section,.pair>*{min-width:0}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:6px 0 4px;font-size:13px;color:var(--soft);padding:0;list-style:none}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums;margin:8px 0 0;min-width:min(100%,420px)}
caption{text-align:left;color:var(--soft);font-size:13px;padding:4px 0}
th,td{padding:4px 14px 4px 0;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--soft)}
tbody th{color:var(--ink);white-space:nowrap}
section>.scroll:first-child table{margin-top:0}
td.n,th.n{text-align:right;white-space:nowrap}
td.wide{max-width:46em;overflow-wrap:anywhere}
th i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px}
details{margin-top:10px}
summary{cursor:pointer;color:var(--soft);font-size:13.5px}
.chart{position:relative;margin-top:6px}
.chart svg{display:block;width:100%;overflow:visible}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--soft)}
svg text.b{fill:var(--ink)}
svg .axis{stroke:var(--line)}
svg .grid{stroke:var(--grid)}
svg .mark{stroke:var(--soft);stroke-dasharray:3 3}
svg .peak{stroke:var(--ink);stroke-dasharray:5 3;fill:none}
svg .end{stroke:var(--ink);stroke-width:2}
svg .planned{stroke:var(--ink);stroke-width:1.6;fill:none}
svg .band{fill:var(--band)}
svg .cross{stroke:var(--soft);visibility:hidden}
svg .hit{fill:transparent}
svg .curve{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}
svg .all{stroke:var(--ink)}
.tip{position:absolute;pointer-events:none;visibility:hidden;background:var(--card);color:var(--ink);border:1px solid var(--line);
border-radius:6px;padding:6px 9px;font-size:12.5px;line-height:1.45;box-shadow:0 3px 12px #0003;white-space:nowrap;z-index:2;font-variant-numeric:tabular-nums}
.tip i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:6px}
noscript p{color:#b00020}
footer{color:var(--soft);font-size:13px;margin-top:20px}
@media print{section{break-inside:avoid}body{background:#fff}}
)css";
}

}  // namespace zero::report
