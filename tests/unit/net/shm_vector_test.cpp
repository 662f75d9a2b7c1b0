// comm/shm/mapped_buffer.h: contiguous shards of all ranks, of any size, and the guarantees for readers. Ranks are
// threads; deaths are tested in dist/shm_in_place_test.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <zero/errors.h>

#include "comm/group.h"
#include "comm/symmetric_buffer.h"
#include "support/require.h"
#include "support/shm_threads.h"

namespace zero::test::shm_vector_test {
namespace {

// Other values for every rank, round and element.
at::Tensor values(std::int64_t numel, int rank, int round) {
  return at::arange(numel, at::kLong).add(1000 * rank + 7 * round).remainder(509).to(at::kFloat);
}

at::Tensor all_values(std::int64_t numel, int size, int round) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < size; ++rank) parts.push_back(values(numel, rank, round));
  return at::cat(parts);
}

// A page has 1024 elements. Shards end at page boundaries, and anywhere in a page.
TEST(ShmVector, ShardsOfAnySizeLieSideBySide) {
  for (const std::int64_t numel : {1024, 1025, 1500, 3000, 10240}) {
    with_shm_threads(3, [&](const Comm& comm) {
      const auto vector = comm::group_of(*comm)->share(numel, at::kFloat);
      require(vector->shard().numel() == numel && vector->whole().numel() == 3 * numel, "sizes");
      const auto* data = vector->whole().const_data_ptr();
      for (int round = 0; round < 3; ++round) {
        vector->shard().copy_(values(numel, comm->rank(), round));
        vector->publish();
        vector->wait();
        require(torch::equal(vector->whole(), all_values(numel, 3, round)),
                std::to_string(numel) + " elements, round " + std::to_string(round));
        require(vector->whole().const_data_ptr() == data, "it moved");
        comm->barrier();  // no rank writes while another still reads
      }
    });
  }
}

TEST(ShmVector, NoneForAShardOfLessThanAPage) {
  with_shm_threads(2, [](const Comm& comm) {
    require(comm::group_of(*comm)->share(1023, at::kFloat) == nullptr &&
                comm::group_of(*comm)->share(2047, at::kBFloat16) == nullptr,
            "too small");
    require(comm::group_of(*comm)->share(1024, at::kFloat) != nullptr, "a page");
  });
}

TEST(ShmVector, OtherTypesAndSeveralAtOnce) {
  with_shm_threads(2, [](const Comm& comm) {
    const auto half = comm::group_of(*comm)->share(3001, at::kBFloat16);
    const auto whole = comm::group_of(*comm)->share(777, at::kDouble);
    half->shard().fill_(comm->rank() + 1);
    whole->shard().fill_(comm->rank() + 10);
    whole->publish();
    half->publish();
    half->wait();
    whole->wait();
    require(half->whole().slice(0, 0, 3001).eq(1).all().item<bool>() &&
                half->whole().slice(0, 3001).eq(2).all().item<bool>(),
            "bf16");
    require(whole->whole()[0].item<double>() == 10 && whole->whole()[1553].item<double>() == 11, "fp64");
  });
}

// A peer waits until the slower rank has published, and then reads the published values.
TEST(ShmVector, WaitIsForAllPublications) {
  std::atomic<bool> waiting{false}, published{false};
  with_shm_threads(2, [&](const Comm& comm) {
    const auto vector = comm::group_of(*comm)->share(2000, at::kFloat);
    vector->wait();  // as often as it has published itself: never
    vector->shard().fill_(comm->rank() + 1);
    if (comm->rank() == 0) {
      vector->publish();
      waiting = true;
      vector->wait();
      require(published, "it did not wait");
      require(vector->whole()[2000].item<float>() == 2, "the other's shard");
    } else {
      while (!waiting) std::this_thread::yield();
      published = true;
      vector->publish();
      vector->wait();
    }
  });
}

TEST(ShmVector, WhatWasPublishedOutlivesTheVectorsOfPeers) {
  std::atomic<int> gone{0};
  with_shm_threads(2, [&](const Comm& comm) {
    auto vector = comm::group_of(*comm)->share(5000, at::kFloat);
    vector->shard().fill_(comm->rank() + 1);
    vector->publish();
    vector->wait();
    if (comm->rank() == 1) {
      vector.reset();
      auto other = comm->allocate(20000, at::kFloat);
      other.fill_(9);  // what it takes next is other memory
      ++gone;
      comm->barrier();
      return;
    }
    const auto whole = vector->whole();
    vector.reset();
    while (gone < 1) std::this_thread::yield();
    require(whole.slice(0, 5000).eq(2).all().item<bool>(), "the peer's shard went away");
    comm->barrier();
  });
}

TEST(ShmVector, APeerThatGaveItsShardUpUnpublishedIsNamed) {
  EXPECT_THROW(with_shm_threads(2,
                                [](const Comm& comm) {
                                  auto vector = comm::group_of(*comm)->share(2000, at::kFloat);
                                  if (comm->rank() == 1) {
                                    vector.reset();
                                    return;
                                  }
                                  vector->publish();
                                  try {
                                    vector->wait();
                                  } catch (const CommError& error) {
                                    require(error.rank() == 1 && contains(error.what(), "given up its shard"),
                                            error.what());
                                    throw;
                                  }
                                }),
               CommError);
}

TEST(ShmVector, ShardsOfDifferentSizesAreAnError) {
  EXPECT_ANY_THROW(with_shm_threads(2, [](const Comm& comm) {
    auto vector = comm::group_of(*comm)->share(2000 + comm->rank(), at::kFloat);
    comm::group_of(*comm)->gather(*vector);
  }));
}

}  // namespace
}  // namespace zero::test::shm_vector_test
