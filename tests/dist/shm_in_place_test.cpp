// In-place reads between processes of one host: shards of a symmetric buffer, and gradients in segments.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "comm/group.h"
#include "comm/symmetric_buffer.h"
#include "comm/tensor_segments.h"
#include "support/shm_ranks.h"

namespace zero::test::shm_in_place_test {
namespace {

using namespace std::chrono_literals;

class ShmInPlace : public ::testing::TestWithParam<int> {};

// Shards that are multiples of a page, that cross page boundaries, and that are just large enough; re-read after each
// publish.
TEST_P(ShmInPlace, ReadSymmetricBuffersInPlace) {
  const int size = GetParam();
  const auto ends = with_ranks(size, [size](const Comm& comm) {
    require(comm::group_of(*comm)->share(1000, at::kFloat) == nullptr, "a small shard was shared");
    for (const std::int64_t numel :
         {std::int64_t{1024}, std::int64_t{1500}, std::int64_t{8193}, std::int64_t{2130432}, std::int64_t{100003}}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        const auto vector = comm::group_of(*comm)->share(numel, dtype);
        if (numel * static_cast<std::int64_t>(c10::elementSize(dtype)) < 4096) {
          require(vector == nullptr, "a small shard was shared");
          continue;
        }
        require(vector->whole().numel() == size * numel, "numel");
        for (int step = 0; step < 3; ++step) {
          comm->barrier();  // no rank reads any more
          vector->shard().copy_(at::arange(numel).remainder(97) + (7 * comm->rank() + step));
          if (comm->rank() == step % size) std::this_thread::sleep_for(20ms);
          vector->publish();
          comm::group_of(*comm)->gather(*vector);
          for (int rank = 0; rank < size; ++rank)
            require(
                vector->whole()
                    .narrow(0, rank * numel, numel)
                    .equal((at::arange(numel).remainder(97) + (7 * rank + step)).to(dtype)),
                "step " + std::to_string(step) + ", shard " + std::to_string(rank) + " of " + std::to_string(numel));
        }
        comm->barrier();
      }
    }
  });
  EXPECT_EQ(errors_of(ends), "");
}

// Segments of odd sizes with gaps, across shard boundaries, compared with the sum of one flat buffer.
TEST_P(ShmInPlace, ReduceWhatLiesInStretches) {
  const int size = GetParam();
  const auto ends = with_ranks(size, [size](const Comm& comm) {
    const std::vector<std::int64_t> numels{3, 70001, 1, 200000, 129};
    std::int64_t end = 0;
    for (const auto numel : numels) end += numel + 5;
    const std::int64_t shard = (end + size - 1) / size + 17, begin = comm->rank() * shard;
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (int way = 0; way < 3; ++way) {  // apart, in place, to all
        auto flat = comm->allocate(shard * size, dtype).zero_(), expected = comm->allocate(shard, dtype);
        comm::PeerReduce sum;
        sum.shard_numel = shard;
        std::int64_t at = 0;
        for (const auto numel : numels) {
          auto data = comm->allocate(numel, dtype);
          data.copy_((at::arange(numel).remainder(1013) * 0.37 + comm->rank() * 1.1 + at).cos());
          flat.narrow(0, at, numel).copy_(data);
          sum.vector.push_back({at, data});
          at += numel + 5;
        }
        const auto stretches = sum.vector;
        auto before = flat.clone();
        comm->reduce_scatter(expected, flat)->wait();
        std::int64_t told = 0;
        sum.summed = [&told, shard](std::int64_t from, std::int64_t to) {
          require(from == told && to > from && (to == shard || to % comm::kSummedNumel == 0), "order of the sums");
          told = to;
        };
        auto out = at::zeros({shard}, dtype);
        if (way == 0) sum.out = out;
        sum.to_all = way == 2;
        if (comm->rank() == way % size) std::this_thread::sleep_for(10ms);
        auto work = comm::group_of(*comm)->peer_reduce_scatter(std::move(sum));
        work->wait();
        require(told == shard, "the whole shard was not told");
        auto whole = comm->allocate(shard * size, dtype);
        comm->all_gather(whole, expected)->wait();
        auto got = at::zeros({shard * size}, dtype);
        for (const auto& stretch : stretches) got.narrow(0, stretch.begin, stretch.data.numel()).copy_(stretch.data);
        const auto what = "way " + std::to_string(way);
        if (way == 0) require(out.equal(expected) && got.equal(before), what);
        if (way == 1) require(got.narrow(0, begin, shard).equal(expected), what);
        if (way == 2) require(got.equal(whole), what);
      }
    }
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(ShmInPlaceFailure, NamesAPeerThatGaveItsShardUpOrDied) {
  const auto ends = with_ranks(3, [](const Comm& comm) {
    auto vector = comm::group_of(*comm)->share(10000, at::kFloat);
    vector->publish();
    comm::group_of(*comm)->gather(*vector);
    comm->barrier();
    if (comm->rank() == 1) vector.reset();
    comm->barrier();
    if (comm->rank() == 1) return;
    comm::group_of(*comm)->gather(*vector);  // the published values
    vector->publish();
    comm::group_of(*comm)->gather(*vector);
  });
  for (const int rank : {0, 2})
    EXPECT_TRUE(contains(ends[rank].error, "rank 1 has given up its shard")) << ends[rank].error;
  const auto dead = with_ranks(2, [](const Comm& comm) {
    auto vector = comm::group_of(*comm)->share(10000, at::kFloat);
    if (comm->rank() == 1) ::kill(::getpid(), SIGKILL);
    vector->publish();
    comm::group_of(*comm)->gather(*vector);
  });
  EXPECT_TRUE(contains(dead[0].error, "rank 1")) << dead[0].error;
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmInPlace, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace zero::test::shm_in_place_test
