/** Addresses of the screens: each view has one, and an address leads back to the same view. */

export type Route =
  | { screen: "jobs" }
  | { screen: "job"; job: string }
  | { screen: "rank"; job: string; rank: string }
  | { screen: "timeline"; job: string }
  | { screen: "flame"; job: string }
  | { screen: "groups" }
  | { screen: "group"; name: string }
  | { screen: "workers" }
  | { screen: "sql" }
  | { screen: "nodes" }
  | { screen: "missing" };

export type Params = Record<string, string | null | undefined>;

/** Returns the screen of a path; a path with a broken percent sign has none. */
export function routeOf(path: string): Route {
  let parts: string[];
  try {
    parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    return { screen: "missing" };
  }
  const [first, job, view, rank] = parts;
  if (parts.length === 0 || (first === "jobs" && parts.length === 1)) return { screen: "jobs" };
  if (first === "groups" && parts.length === 1) return { screen: "groups" };
  if (first === "groups" && job !== undefined && parts.length === 2) return { screen: "group", name: job };
  if (first === "workers" && parts.length === 1) return { screen: "workers" };
  if (first === "sql" && parts.length === 1) return { screen: "sql" };
  if (first === "nodes" && parts.length === 1) return { screen: "nodes" };
  if (first !== "job" || job === undefined) return { screen: "missing" };
  if (parts.length === 2) return { screen: "job", job };
  if (view === "rank" && rank !== undefined && parts.length === 4) return { screen: "rank", job, rank };
  if (parts.length === 3 && view === "timeline") return { screen: "timeline", job };
  if (parts.length === 3 && view === "flame") return { screen: "flame", job };
  return { screen: "missing" };
}

/** Returns the path of a screen. */
export function pathOf(route: Route): string {
  switch (route.screen) {
    case "jobs":
    case "groups":
    case "workers":
    case "sql":
    case "nodes":
      return `/${route.screen}`;
    case "group":
      return `/groups/${segment(route.name)}`;
    case "job":
      return `/job/${segment(route.job)}`;
    case "rank":
      return `/job/${segment(route.job)}/rank/${segment(route.rank)}`;
    case "timeline":
    case "flame":
      return `/job/${segment(route.job)}/${route.screen}`;
    case "missing":
      return "/jobs";
  }
}

// A segment of dots alone would be taken for a folder.
function segment(name: string): string {
  return /^\.+$/.test(name) ? name.replace(/\./g, "%2E") : encodeURIComponent(name);
}

/** Returns `path` with those parameters that have a value. */
export function withParams(path: string, params: Params): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}
