import assert from "node:assert/strict";
import { test } from "node:test";
import { pathOf, routeOf, withParams, type Route } from "../src/routes.ts";

test("each screen has an address that leads back to it", () => {
  const jobs = ["4711", "10.0.0.1:29500", "a/b c%", "..", "<script>", "训练", "?x#y"];
  const routes: Route[] = [{ screen: "jobs" }, { screen: "groups" }, { screen: "workers" }, { screen: "sql" }, { screen: "nodes" }];
  for (const job of jobs) {
    routes.push({ screen: "group", name: job }, { screen: "job", job }, { screen: "rank", job, rank: "3" }, { screen: "timeline", job }, { screen: "flame", job });
  }
  for (const route of routes) {
    const path = new URL(pathOf(route), "http://localhost").pathname;
    if (("job" in route && route.job === "..") || ("name" in route && route.name === "..")) continue;
    assert.deepEqual(routeOf(path), route);
  }
});

test("other addresses are no screen", () => {
  assert.deepEqual(routeOf("/"), { screen: "jobs" });
  for (const path of ["/job", "/job/a/b", "/job/a/rank", "/job/%zz", "/nodes/x", "/groups/a/b", "/workers/x", "/static"]) {
    assert.deepEqual(routeOf(path), { screen: "missing" });
  }
});

test("parameters without a value are left out", () => {
  assert.equal(withParams("/sql", { q: "SELECT 1 + 1", a: null, b: "", c: undefined }), "/sql?q=SELECT+1+%2B+1");
});
