#define LARGE (64ULL << 20)
#define MAP_ANONYMOUS 0x20

static int mmap_called(struct pt_regs *ctx)
{
	struct large_allocations_event event = {};

	if (PT_REGS_PARM2(ctx) < LARGE)
		return 0;
	event.size_bytes = PT_REGS_PARM2(ctx);
	event.anonymous = (PT_REGS_PARM4(ctx) & MAP_ANONYMOUS) != 0;
#ifdef __x86_64__
	bpf_probe_read_user(&event.caller, sizeof(event.caller), (void *)PT_REGS_SP(ctx));
#else
	event.caller = ctx->regs[30];
#endif
	return probing_emit(&event);
}
