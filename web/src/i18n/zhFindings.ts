/** 结论与 rank 状况的中文句子，按 docs/verdicts.md 的名称。服务器的英文句子含有细节，显示在其下方。 */

const SOME = "有 rank ";
// {ranks} 处填入 rank；有两句时，第二句用于没有责任 rank 的结论。
const VERDICTS: Record<string, string | readonly [string, string]> = {
  shifted_sequence: "{ranks}跳过了集合通信，此后与其他 rank 错位",
  operation_mismatch: "{ranks}调用的集合通信与其他 rank 不同",
  root_mismatch: "{ranks}给集合通信的 root 与其他 rank 不同",
  dtype_mismatch: "{ranks}给集合通信的数据类型与其他 rank 不同",
  size_mismatch: "{ranks}给集合通信的数据大小与其他 rank 不同",
  rank_dead: "{ranks}已经结束，而其他 rank 还在等待",
  rank_unreachable: "{ranks}所在的节点没有响应，而其他 rank 在等待",
  unmatched_p2p: "{ranks}的发送或接收没有对端",
  deadlock: "{ranks}处于互相等待的环中",
  idle: "{ranks}空闲：服务没有收到请求",
  not_joined: "{ranks}没有加入其他 rank 正在等待的操作",
  communicator_error: ["{ranks}使通信器出错，或中止了它", "通信器出错或被中止，起因不明"],
  no_completion: "所有 rank 都已加入的操作没有完成",
  init_stuck: ["{ranks}没有加入，通信器无法建立", "各 rank 停在通信器的创建中"],
  stuck_outside: ["{ranks}停在集合通信之外", "所有 rank 都在集合通信之外"],
  phase: "作业停在标签所说的阶段",
  rank_lingers: "其他 rank 已经结束，{ranks}还没有结束",
  rank_died: ["有 rank 死亡，起因是 {ranks}", "有 rank 死亡，起因不明"],
  slow_rank: "{ranks}拖慢了其他 rank",
  rotating_straggler: "每一步最后到达的 rank 都不同",
  passed_straggler: "{ranks}曾有一段时间拖慢其他 rank",
  job_slowdown: "所有 rank 都比以前慢",
  memory_growth: "{ranks}的内存持续增长",
  memory_imbalance: "{ranks}的内存远多于其他 rank",
  bad_values: "{ranks}的损失值为 NaN、无穷大，或发生突变",
  mixed_devices: "此作业的 GPU 互不相同",
  fabric_fault: "同一 NVLink 域的多个 GPU 同时报错",
  gpu_fault: ["{ranks}的 GPU 丢失或报错", "GPU 丢失或报错"],
  gpu_throttled: ["{ranks}的 GPU 降频", "GPU 降频"],
  network_fault: ["{ranks}所在节点的网络端口断开或报错", "网络端口断开或报错"],
  packet_loss: ["{ranks}的连接丢包", "连接丢包"],
  storage_fault: ["{ranks}所用的文件系统已满或没有响应，或磁盘变慢、报错", "文件系统已满或没有响应，或磁盘变慢、报错"],
  healthy: "此作业没有问题",
  cannot_tell: "无法判断此作业是否有问题",
  host_fault: ["{ranks}所在节点的处理器、内存或内核报错", "处理器、内存或内核报错"],
};

const ACTIVITIES: Record<string, string> = {
  exited: "进程已经结束",
  stopped: "进程被信号停止，或被 cgroup 冻结",
  traced: "进程被调试器控制",
  lock: "等待锁、队列、其他线程或文件锁",
  cuda_context_lock: "等待正在加载代码的 CUDA 上下文",
  stdin: "等待输入",
  pipe: "等待管道的另一端",
  data_loader: "等待或读取下一个批次",
  data_loader_worker: "数据加载的 worker 死亡、停止或没有进展",
  checkpoint: "写入或读取检查点",
  disk_io: "等待文件系统",
  gil_held: "有线程一直占用 GIL",
  swapping: "等待被换出的内存页",
  throttled: "受 cgroup 的 CPU 配额限制",
  starved: "可以运行，但得不到 CPU",
  compiling: "正在编译",
  garbage_collection: "Python 正在回收垃圾",
  nccl_init: "在通信器的创建或 store 中等待其他 rank",
  idle: "没有请求，正在等待",
  rpc: "等待其他 rank 的 RPC 应答",
  sleeping: "按程序的要求休眠",
  child: "等待它启动的进程",
  network: "等待网络",
  bad_hardware: "所用硬件降频或有故障",
  computing: "正在运行",
  in_collective: "在集合通信或收发中等待",
};

/** 返回结论的句子；不认识的结论为 null。`ranks` 如 `1,3-5`，可为空；`victims`：受影响的 rank 数。 */
export function verdictSentence(verdict: string, ranks: string, victims: number): string | null {
  const known = VERDICTS[verdict];
  if (known === undefined) return null;
  const [named, unnamed] = typeof known === "string" ? [known, known] : known;
  const sentence = ranks ? named.replace("{ranks}", `rank ${ranks} `).trim() : unnamed.replace("{ranks}", SOME);
  return victims ? `${sentence}，影响 ${victims} 个 rank` : sentence;
}

/** 返回 rank 状况的说明；不认识的为 null。 */
export function activityTitle(activity: string): string | null {
  return ACTIVITIES[activity] ?? null;
}
