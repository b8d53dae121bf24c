/* dlopen(3) is in libc.so.6 from glibc 2.34 on, in libdl.so.2 before. */
struct load {
	u64 started_ns;
	u64 path;
};

/* By thread; one that ends within the call leaves an entry, which is pushed out in time. */
BPF_TABLE("lru_hash", u64, struct load, loads, 4096);

static int dlopen_called(struct pt_regs *ctx)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct load load = {.started_ns = bpf_ktime_get_ns(), .path = PT_REGS_PARM1(ctx)};

	loads.update(&thread, &load);
	return 0;
}

static int dlopen_returned(struct pt_regs *ctx)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct load *load = loads.lookup(&thread);
	struct library_loads_event event = {};

	if (!load)
		return 0;
	event.duration_ns = bpf_ktime_get_ns() - load->started_ns;
	event.failed = PT_REGS_RC(ctx) == 0;
	/* At its end: the call has touched the text by then, so that it can be read without a page fault. */
	bpf_probe_read_user_str(event.path, sizeof(event.path), (void *)load->path);
	loads.delete(&thread);
	return probing_emit(&event);
}
