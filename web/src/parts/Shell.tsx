/** The frame of each screen: where one is, where one can go, colours, language, and whether the server answers. */
import type { ComponentChildren } from "preact";
import { loginNeeded, post, serverGone, session } from "../api.ts";
import { language, speak, words, type Language } from "../i18n/index.ts";
import { liveState } from "../live.ts";
import { href, route } from "../location.ts";
import { choose, theme, type Theme } from "../theme.ts";
import { visible } from "../text/escape.ts";

export function Shell({ children }: { children: ComponentChildren }) {
  const w = words.value;
  const at = route.value;
  const job = "job" in at ? at.job : null;
  const current = (is: boolean) => (is ? ({ "aria-current": "page" } as const) : {});
  return (
    <>
      <a class="skip" href="#content">{w.nav.skip}</a>
      <header class="top">
        <span class="brand" aria-hidden="true">probing</span>
        <nav aria-label={w.nav.main}>
          <a href={href({ screen: "jobs" })} {...current(at.screen === "jobs")}>{w.nav.jobs}</a>
          <a href={href({ screen: "groups" })} {...current(at.screen === "groups" || at.screen === "group")}>{w.nav.groups}</a>
          <a href={href({ screen: "workers" })} {...current(at.screen === "workers")}>{w.nav.workers}</a>
          <a href={href({ screen: "sql" })} {...current(at.screen === "sql")}>{w.nav.sql}</a>
          <a href={href({ screen: "nodes" })} {...current(at.screen === "nodes")}>{w.nav.nodes}</a>
        </nav>
        <span class="top-end">
          <LiveSign />
          <Choices />
          {session.value && location.protocol === "https:" ? <button type="button" onClick={signOut}>{w.login.out}</button> : null}
        </span>
      </header>
      {serverGone.value ? (
        <div class="banner" role="alert">
          <b>✕ {w.state.gone}.</b> {w.state.goneHint}
        </div>
      ) : null}
      {job !== null ? (
        <nav class="job-nav" aria-label={w.nav.job}>
          <span class="job-name" title={visible(job, 300)}>{visible(job, 60)}</span>
          <a href={href({ screen: "job", job })} {...current(at.screen === "job")}>{w.nav.overview}</a>
          <a href={href({ screen: "timeline", job })} {...current(at.screen === "timeline")}>{w.nav.timeline}</a>
          <a href={href({ screen: "flame", job })} {...current(at.screen === "flame")}>{w.nav.flame}</a>
          {at.screen === "rank" ? (
            <a href={location.pathname + location.search} aria-current="page">{w.rank.title(visible(at.rank, 20))}</a>
          ) : null}
        </nav>
      ) : null}
      <main id="content" tabIndex={-1}>{children}</main>
    </>
  );
}

function LiveSign() {
  const state = liveState.value;
  const screen = route.value.screen;
  if (screen !== "jobs" && screen !== "job" && screen !== "rank") return null;
  const w = words.value.live;
  return (
    <span class={`live ${state}`} role="status">
      <span aria-hidden="true">{state === "on" ? "●" : "○"}</span> {w[state]}
    </span>
  );
}

function Choices() {
  const w = words.value;
  return (
    <>
      <label>
        <span class="hidden-label">{w.theme.label}</span>
        <select value={theme.value} onChange={(event) => choose(event.currentTarget.value as Theme)}>
          <option value="auto">{w.theme.auto}</option>
          <option value="light">{w.theme.light}</option>
          <option value="dark">{w.theme.dark}</option>
        </select>
      </label>
      <label>
        <span class="hidden-label">{w.language}</span>
        <select value={language.value} onChange={(event) => speak(event.currentTarget.value as Language)}>
          <option value="en" lang="en">English</option>
          <option value="zh" lang="zh">中文</option>
        </select>
      </label>
    </>
  );
}

async function signOut(): Promise<void> {
  await post("logout", {}).catch(() => undefined);
  loginNeeded.value = true;
}
