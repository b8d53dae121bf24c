/* The gloo of XLA with the names and the calling convention of jaxlib 0.10, and no communication: its ranks are alone. */
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace stream_executor {
struct DeviceAddressBase {
	void *opaque;
	uint64_t size, payload;
};
} // namespace stream_executor

namespace gloo {
struct Context {};
} // namespace gloo

namespace tsl::gtl {
template <typename Tag, typename T> struct IntType {
	T value;
};
} // namespace tsl::gtl

namespace tsl {
/* Not trivial, so that it is returned in memory. */
template <typename T> struct Future {
	void *parts[8];
	Future() : parts{} {}
	~Future() {}
};
} // namespace tsl

namespace absl::lts_20260107 {
template <typename T> struct Span {
	T *pointer;
	size_t length;
};
template <typename T, size_t N, typename A> struct InlinedVector {
	T items[N];
	~InlinedVector() {}
};
} // namespace absl::lts_20260107

namespace xla {
enum PrimitiveType : int {};
enum class ReductionKind : int {};
struct RankId_tag_;
using RankId = tsl::gtl::IntType<RankId_tag_, long>;
struct CliqueKey {
	virtual ~CliqueKey() {}
	std::vector<int> devices;
};
struct CliqueIds {};
struct Collectives {
	struct DeviceRank {
		void *device;
		long rank;
	};
	struct Config {};
};
struct Communicator {
	struct Executor {};
	virtual ~Communicator() {}
};
} // namespace xla


namespace xla::cpu {
using stream_executor::DeviceAddressBase;
using Buffers = absl::lts_20260107::InlinedVector<DeviceAddressBase, 4, std::allocator<DeviceAddressBase>>;
using Done = tsl::Future<void>;
using Executor = Communicator::Executor;

static void work(unsigned microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }
// Of each thread: a thread that begins an operation runs beside the next call.
static thread_local unsigned took = 0;

class GlooCommunicator : public Communicator {
	std::shared_ptr<gloo::Context> context;

      public:
	size_t rank, ranks;
	__attribute__((noinline)) GlooCommunicator(std::shared_ptr<gloo::Context> made, size_t own, size_t all)
	    : context(std::move(made)), rank(own), ranks(all) {}
	Done AllReduce(DeviceAddressBase, DeviceAddressBase, PrimitiveType, size_t, ReductionKind, const Executor &);
	Done AllGather(DeviceAddressBase, DeviceAddressBase, PrimitiveType, size_t, const Executor &);
	Done ReduceScatter(DeviceAddressBase, DeviceAddressBase, PrimitiveType, size_t, ReductionKind, const Executor &);
	Done AllToAll(Buffers, Buffers, PrimitiveType, size_t, const Executor &);
	Done CollectivePermute(DeviceAddressBase, DeviceAddressBase, PrimitiveType, size_t, std::optional<RankId>,
			       absl::lts_20260107::Span<const RankId>, const Executor &);
};
#define OPERATION(signature)                                                                                           \
	__attribute__((noinline)) Done GlooCommunicator::signature                                                    \
	{                                                                                                              \
		work(took);                                                                                            \
		return Done();                                                                                         \
	}
OPERATION(AllReduce(DeviceAddressBase, DeviceAddressBase, PrimitiveType, size_t, ReductionKind, const Executor &))
OPERATION(AllGather(DeviceAddressBase, DeviceAddressBase, PrimitiveType, size_t, const Executor &))
OPERATION(ReduceScatter(DeviceAddressBase, DeviceAddressBase, PrimitiveType, size_t, ReductionKind, const Executor &))
OPERATION(AllToAll(Buffers, Buffers, PrimitiveType, size_t, const Executor &))
OPERATION(CollectivePermute(DeviceAddressBase, DeviceAddressBase, PrimitiveType, size_t, std::optional<RankId>,
			    absl::lts_20260107::Span<const RankId>, const Executor &))

using Communicators = std::vector<std::unique_ptr<Communicator>>;
struct GlooCollectives {
	Communicators CreateCommunicators(const CliqueKey &, const std::optional<CliqueIds> &,
					  absl::lts_20260107::Span<const Collectives::DeviceRank>,
					  const Collectives::Config &);
};
__attribute__((noinline)) Communicators
GlooCollectives::CreateCommunicators(const CliqueKey &key, const std::optional<CliqueIds> &,
				     absl::lts_20260107::Span<const Collectives::DeviceRank> ranks,
				     const Collectives::Config &)
{
	Communicators made;
	for (size_t i = 0; i < ranks.length; i++)
		made.push_back(std::make_unique<GlooCommunicator>(std::make_shared<gloo::Context>(),
								  ranks.pointer[i].rank, key.devices.size()));
	return made;
}
} // namespace xla::cpu

/* What the test calls. Communicators are made for the devices `first` to `first + count - 1`, of which `rank` is ours. */
extern "C" void *jax_double_create(int first, int count, long rank)
{
	xla::CliqueKey key;
	xla::Collectives::DeviceRank place = {nullptr, rank};
	xla::cpu::GlooCollectives collectives;

	for (int i = 0; i < count; i++)
		key.devices.push_back(first + i);
	auto made = collectives.CreateCommunicators(key, std::nullopt, {&place, 1}, {});
	return made[0].release();
}

extern "C" void jax_double_break(void *communicator, size_t rank, size_t ranks)
{
	auto *one = static_cast<xla::cpu::GlooCommunicator *>(communicator);
	one->rank = rank;
	one->ranks = ranks;
}

extern "C" void jax_double_call(void *communicator, int operation, int type, size_t count, int kind, unsigned us)
{
	auto *one = static_cast<xla::cpu::GlooCommunicator *>(communicator);
	auto dtype = static_cast<xla::PrimitiveType>(type);
	auto reduction = static_cast<xla::ReductionKind>(kind);
	xla::Communicator::Executor executor;

	xla::cpu::took = us;
	switch (operation) {
	case 0:
		one->AllReduce({}, {}, dtype, count, reduction, executor);
		break;
	case 1:
		one->AllGather({}, {}, dtype, count, executor);
		break;
	case 2:
		one->ReduceScatter({}, {}, dtype, count, reduction, executor);
		break;
	case 3:
		one->AllToAll({}, {}, dtype, count, executor);
		break;
	default:
		one->CollectivePermute({}, {}, dtype, count, xla::RankId{1}, {nullptr, 0}, executor);
	}
}
