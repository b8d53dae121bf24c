/** What the server of the page answers; docs/json.md has the shapes of each command. */

export interface Failure {
  node: string | null;
  error: string;
}

export interface Contract {
  asked: number;
  answered: number;
  failures: Failure[];
  at: string;
  lost_rows: number | null;
  clock_error_ns: number | null;
}

export interface Answer<T> {
  contract: Contract;
  data: T;
}

export interface Session {
  target: string;
  all_nodes: boolean;
  user: string | null;
  version: string;
  can: string[] | null;
  languages: string[];
  login_needed: boolean;
  /** What a visitor shows: the key of the printed address, or a token. */
  login?: "key" | "token" | null;
}

export type Severity = "error" | "warning" | "note";

export interface FindingBrief {
  finding_id: string;
  verdict: string;
  severity: Severity | null;
  sentence: string;
  opened: string | null;
  /** Numbers of ranks. */
  culprits: number[];
  victims?: number[];
}

export interface JobLine {
  job: string;
  run: string;
  state: string;
  ranks: number;
  world_size: number | null;
  nodes: string[];
  steps_per_s: number | null;
  steps_series: (number | null)[];
  finding: FindingBrief | null;
  ended?: string | null;
}

/** The event `jobs` of /api/live/jobs. */
export interface JobsEvent {
  contract: Contract;
  notes: string[];
  jobs: JobLine[];
}

/** The event `job` of /api/live/job. */
export interface JobEvent {
  contract: Contract;
  notes?: string[];
  job: JobLine | null;
  ranks: Columns;
}

export interface Frame {
  func: string;
  file: string;
  lineno: number | null;
  frame_type: string;
  locals?: Local[];
}

export interface Local {
  name: string;
  type: string;
  value: string | null;
  reason?: string | null;
}

export interface Thread {
  node: string;
  job?: string | null;
  run?: string | null;
  rank: number | null;
  pid: number;
  tid: number;
  thread: string;
  trains?: boolean;
  state: string | null;
  gil: boolean | null;
  complete?: boolean;
  frames: Frame[];
  native_missing?: string | null;
}

export interface FindingStack extends Thread {
  role: "culprit" | "victim";
  since: string | null;
  moving: boolean | null;
}

export interface Culprit {
  rank: number | null;
  node: string | null;
  pid: number | null;
  why: string;
  activity?: string | null;
}

export interface Finding {
  finding_id?: string;
  job: string;
  run: string;
  taken?: string | null;
  verdict: string;
  severity: Severity | null;
  confidence: number;
  sentence: string;
  culprits: Culprit[];
  victims: number[];
  since: string | null;
  evidence: string[];
  missing: string[];
  refuted_by: string[];
  next_steps: string[];
  advice?: { action: string; nodes: string[]; reason: string } | null;
  ends?: { at: string; by: string } | null;
  stacks: FindingStack[];
  others?: Finding[];
}

export interface HistoryRow {
  finding_id: string;
  ts: string;
  job: string;
  run: string;
  verdict: string;
  severity: Severity;
  state: string;
  sentence: string;
  opened: string | null;
  closed: string | null;
}

/** An operation in flight: lists of ranks as ranges, those in it and those that it lacks. */
export interface PendingOperation {
  comm: string | number;
  comm_name: string | null;
  seq: number | null;
  op: string;
  age_ns: number | null;
  waiters: string;
  awaited: string;
  unknown: string;
}

export interface Waits {
  ranks: { rank: number; node: string; pid: number }[];
  operations: PendingOperation[];
}

export interface Steps {
  ranks: (number | { rank: number })[];
  steps: number[];
  duration_ns: (number | null)[][];
}

export interface BalanceRank {
  rank: number;
  node: string;
  pid: number;
  steps: number;
  step_ns: number | null;
  compute: number | null;
  communication: number | null;
  wait: number | null;
  io: number | null;
  last_share: number | null;
}

export interface Balance {
  job: string;
  run: string;
  uneven: number | null;
  sentences: string[];
  ranks: BalanceRank[];
  roles: { role: string; comms: number; ranks: number; communication: number | null; wait: number | null; last: number | null; last_share: number | null }[];
}

/** A table: names of columns, and rows in their order. */
export interface Columns {
  columns: string[];
  rows: unknown[][];
}

export type Row = Record<string, unknown>;

export interface RankPage {
  process: Row | null;
  ops: Row[];
  in_flight: Row[];
  findings: HistoryRow[];
  logs: Row[];
  series: Record<string, { t: number[]; v: (number | null)[]; unit: string }>;
}

export interface QueryResult {
  columns: { name: string; type: string }[];
  rows: unknown[][];
  truncated: boolean;
  warnings: string[];
}

export interface TableDoc {
  table: string;
  doc: string;
  columns: { name: string; type: string; doc: string }[];
}

export interface ProfileNode {
  name: string;
  value: number;
  ranks?: string | null;
  base?: number | null;
  children?: ProfileNode[];
}

/** A line of `group status`. */
export interface GroupLine {
  group: string;
  owner: string;
  phase: string;
  since: string | null;
  generation: number;
  /** Living ranks of all ranks, as `3/4`. */
  ranks: string;
  master: string;
  why: string | null;
  restarts: number;
  excluded: string[];
  command: string[];
}

export interface GroupRank {
  rank: number;
  worker: string;
  node: string;
  launcher: string;
  state: string;
  since: string | null;
  pid: number | null;
  exit_code: number | null;
  reason: string | null;
  log: string | null;
}

/** What the form changes; commands and variables as a shell reads them. */
export interface GroupSpec {
  version: number;
  workers: string[];
  master: string;
  world_size: number | null;
  master_port: number;
  backend: string;
  restart: string;
  on_hang: string;
  command: string;
  cwd: string;
  env: string;
  max_restarts: number;
  /** Nodes that are enough to start again; 0: all are needed. */
  min_nodes: number;
  grace: string;
  fence: string;
  save: string;
  save_time: string;
}

export interface GroupPage extends GroupLine {
  workers: GroupRank[];
  /** null: another user's group. */
  spec: GroupSpec | null;
}

/** A row of cluster.workers. */
export interface WorkerRow {
  node: string;
  worker: string;
  user: string;
  state: string;
  group_name: string | null;
  rank: number | null;
  rank_state: string | null;
  since: string | null;
  joined: string | null;
  mine: boolean;
}

export interface PlannedRank {
  worker: string;
  rank: number;
  local_rank: number;
  node_rank: number;
  world_size: number;
  master: string;
  backend: string;
}

export interface GroupPreview {
  ranks: PlannedRank[];
  clashes: string[];
}

/** What an order began; null: the `failures` of checks prevent it. */
export interface OrderAnswer {
  said: string | null;
  failures: string[];
}

export interface LogPart {
  text: string;
  end: number;
}

export interface MergedTree {
  job: string;
  thread: string;
  ranks: number[];
  threads: number;
  children: MergedFrame[];
}

export interface MergedFrame extends Frame {
  ranks: number[];
  threads: number;
  complete: boolean;
  children: MergedFrame[];
}
