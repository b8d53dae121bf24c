/** Where the page is, as signals; and the ways to go elsewhere without loading the page again. */
import { computed, signal } from "@preact/signals";
import { pathOf, routeOf, withParams, type Params, type Route } from "./routes.ts";

const place = signal(location.pathname + location.search);

export const route = computed<Route>(() => routeOf(place.value.split("?")[0] ?? "/"));
export const params = computed(() => new URLSearchParams(place.value.split("?")[1] ?? ""));

addEventListener("popstate", () => {
  place.value = location.pathname + location.search;
});

/** Returns the address of a screen. */
export function href(to: Route, query: Params = {}): string {
  return withParams(pathOf(to), query);
}

/** Goes to an address of the page; `replace` leaves no entry in the history. */
export function go(address: string, replace = false): void {
  if (address === place.peek()) return;
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  const before = place.peek().split("?")[0];
  place.value = address;
  if (!replace && address.split("?")[0] !== before) scrollTo(0, 0);
}

/** Changes parameters of this view; null removes one. */
export function setParams(changes: Params, replace = true): void {
  const [path, query] = place.peek().split("?");
  const all = Object.fromEntries(new URLSearchParams(query ?? ""));
  go(withParams(path ?? "/", { ...all, ...changes }), replace);
}

/** Follows links of the page within it; clicks with a key held stay the browser's. */
export function followLinks(event: MouseEvent): void {
  if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const link = (event.target as Element | null)?.closest("a[href]");
  if (!(link instanceof HTMLAnchorElement) || link.target || link.hasAttribute("download")) return;
  const url = new URL(link.href);
  if (url.origin !== location.origin || url.pathname.startsWith("/api/") || url.pathname.startsWith("/static/")) return;
  if (url.hash && url.pathname === location.pathname) return;
  event.preventDefault();
  go(url.pathname + url.search);
}
