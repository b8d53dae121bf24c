/** The page: one screen by its address. */
import { effect } from "@preact/signals";
import { Component, render, type ComponentChildren } from "preact";
import { loginNeeded, openSession, serverGone, session } from "./api.ts";
import { language, words } from "./i18n/index.ts";
import { followLinks, href, route } from "./location.ts";
import { Login } from "./parts/Login.tsx";
import { Loading } from "./parts/Panel.tsx";
import { Shell } from "./parts/Shell.tsx";
import { Flame } from "./screens/Flame.tsx";
import { Group } from "./screens/Group.tsx";
import { Groups } from "./screens/Groups.tsx";
import { Job } from "./screens/Job.tsx";
import { Jobs } from "./screens/Jobs.tsx";
import { Nodes } from "./screens/Nodes.tsx";
import { Rank } from "./screens/Rank.tsx";
import { Sql } from "./screens/Sql.tsx";
import { Timeline } from "./screens/Timeline.tsx";
import { Workers } from "./screens/Workers.tsx";
import "./style/base.css";
import "./style/parts.css";
import "./style/screens.css";
import "./style/timeline.css";
import "./style/groups.css";
import { visible } from "./text/escape.ts";
import "./theme.ts";

const SESSION_RETRY_MS = 3000;

function Screen() {
  const at = route.value;
  if (loginNeeded.value) return <Login />;
  if (session.value === null) return <Loading />;
  switch (at.screen) {
    case "jobs":
      return <Jobs />;
    case "job":
      return <Job key={at.job} job={at.job} />;
    case "rank":
      return <Rank key={`${at.job}\0${at.rank}`} job={at.job} rank={at.rank} />;
    case "timeline":
      return <Timeline key={at.job} job={at.job} />;
    case "flame":
      return <Flame key={at.job} job={at.job} />;
    case "groups":
      return <Groups />;
    case "group":
      return <Group key={at.name} name={at.name} />;
    case "workers":
      return <Workers />;
    case "sql":
      return <Sql />;
    case "nodes":
      return <Nodes />;
    case "missing":
      return (
        <section class="panel">
          <h1>{words.value.state.missing}</h1>
          <p><a href={href({ screen: "jobs" })}>{words.value.state.toJobs}</a></p>
        </section>
      );
  }
}

/** A fault in one screen leaves the way to the others. */
class Guarded extends Component<{ children: ComponentChildren; place: string }, { error: string | null; place: string }> {
  override state = { error: null as string | null, place: "" };

  static override getDerivedStateFromError(error: unknown): { error: string } {
    return { error: error instanceof Error ? `${error.name}: ${error.message}` : String(error) };
  }

  override componentDidUpdate(before: { place: string }): void {
    if (before.place !== this.props.place && this.state.error !== null) this.setState({ error: null });
  }

  override render() {
    if (this.state.error === null) return this.props.children;
    return (
      <section class="panel" role="alert">
        <h1>{words.value.state.wrong}</h1>
        <p>{visible(this.state.error, 1000)}</p>
      </section>
    );
  }
}

function Page() {
  return (
    <Shell>
      <Guarded place={JSON.stringify(route.value)}>
        <Screen />
      </Guarded>
    </Shell>
  );
}

async function start(): Promise<void> {
  try {
    await openSession();
  } catch {
    if (!loginNeeded.value) {
      serverGone.value = true;
      setTimeout(start, SESSION_RETRY_MS);
    }
  }
}

effect(() => {
  document.documentElement.lang = language.value === "zh" ? "zh-Hans" : "en";
});
document.addEventListener("click", followLinks);
const place = document.getElementById("page");
if (place) render(<Page />, place);
void start();
