/** The timeline as one file: the panels of its screen over columns that the document has. It asks nobody for anything. */
import { effect } from "@preact/signals";
import { render } from "preact";
import { useState } from "preact/hooks";
import { language, words } from "./i18n/index.ts";
import "./style/base.css";
import "./style/parts.css";
import "./style/timeline.css";
import { visible } from "./text/escape.ts";
import { duration, number } from "./text/format.ts";
import "./theme.ts";
import { decode } from "./timeline/columns.ts";
import { unpacked } from "./timeline/packed.ts";
import { sceneOf, type Scene } from "./timeline/scene.ts";
import { TimelinePanels } from "./timeline/TimelinePanels.tsx";
import { instant, type View } from "./timeline/view.ts";

function TimelineFile({ scene }: { scene: Scene }) {
  const w = words.value.timeline;
  const [range, setRange] = useState<View | null>(null);
  const time = (us: number) => `${instant(scene.columns.fromNs, us).replace("T", " ").slice(0, 23)}Z`;
  return (
    <>
      <h1 class="screen-title">
        {w.title} · {jobOf(scene)} <small>{w.ops(number(scene.ops.count))}</small>
      </h1>
      <p class="file-range">
        {time(0)} – {time(scene.length)} ({duration(scene.length * 1e3)})
      </p>
      <TimelinePanels scene={scene} view={{ from: 0, to: scene.length }} onView={() => undefined} range={range} onRange={setRange} />
    </>
  );
}

function Broken({ problem }: { problem: unknown }) {
  return (
    <div class="trouble" role="alert">
      <b>{words.value.state.error}</b>
      <span>{visible(problem instanceof Error ? problem.message : String(problem), 1000)}</span>
    </div>
  );
}

function jobOf(scene: Scene): string {
  return visible(String(scene.columns.header["job"] ?? "?"), 300);
}

async function show(place: HTMLElement): Promise<void> {
  const data = document.getElementById("columns");
  try {
    const scene = sceneOf(decode(await unpacked(data?.textContent ?? "")));
    // Its text is as long as the file.
    data?.remove();
    document.title = `${words.value.timeline.title} · ${jobOf(scene)}`;
    place.replaceChildren();
    render(<TimelineFile scene={scene} />, place);
  } catch (problem) {
    place.replaceChildren();
    render(<Broken problem={problem} />, place);
  }
}

effect(() => {
  document.documentElement.lang = language.value === "zh" ? "zh-Hans" : "en";
});
const place = document.getElementById("page");
if (place) void show(place);
