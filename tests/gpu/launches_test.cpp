// What the plug-in asks of the CUDA runtime, without a GPU: the real libzero_cuda.so with a runtime that only notes its
// calls. Which kernels are launched, with which shapes and arguments, on which stream and device, and what an error of
// each call leads to.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gpu/stubbed_plugin.h"
#include "support/file_text.h"
#include "support/folder.h"

namespace zero::test::launches_test {
namespace {

// Every function that enqueues work, in a form that launches as much as it can.
std::map<std::string, std::function<int(Place)>> functions() {
  return {
      {"sum_parts",
       [](Place place) {
         const void* parts[] = {address(1), address(2), address(3)};
         return table().sum_parts(place, address(0), Dtype::F32, parts, 3, Dtype::BF16, kNumel);
       }},
      {"convert",
       [](Place place) { return table().convert(place, address(0), Dtype::BF16, address(1), Dtype::F32, kNumel); }},
      {"copy",
       [](Place place) { return table().convert(place, address(0), Dtype::F16, address(1), Dtype::F16, kNumel); }},
      {"accumulate",
       [](Place place) { return table().accumulate(place, address(0), Dtype::F32, address(1), Dtype::F16, kNumel); }},
      {"scale", [](Place place) { return table().scale(place, address(0), Dtype::F32, 0.5f, kNumel); }},
      {"sums_of_squares", [](Place place) { return squares(place, vectors_of(513, kNumel)); }},
      {"first_non_finite",
       [](Place place) {
         return table().first_non_finite(place, address(0), Dtype::F32, kNumel,
                                         reinterpret_cast<std::int64_t*>(address(1)));
       }},
      {"update_by_norm",
       [](Place place) {
         const auto constants = constants_of(Rule::Lion);
         const std::vector<SizedRange> ranges(257, range_of(0, kNumel));
         return table().update_by_norm(place, &constants, reinterpret_cast<cuda::StepNorm*>(address(9)), ranges.data(),
                                       static_cast<int>(ranges.size()));
       }},
      {"add_sums",
       [](Place place) {
         const int order[] = {0, 1, -1, 2, -1};
         const auto* const sums = reinterpret_cast<const double*>(address(1));
         return table().add_sums(place, sums, order, 5, 7, reinterpret_cast<double*>(address(2)));
       }},
      {"step_norm",
       [](Place place) {
         const auto* const parts = reinterpret_cast<const double*>(address(1));
         return table().step_norm(place, parts, 2, {8, 0.5, 0.25, 1}, reinterpret_cast<cuda::StepNorm*>(address(2)));
       }},
      {"update", [](Place place) { return update(place, std::vector<SizedRange>(257, range_of(0, kNumel))); }},
  };
}

}  // namespace

TEST_F(GpuLaunches, EachFunctionLaunchesWhatItsDescriptionSays) {
  const std::map<std::string, Names> expected{
      {"sum_parts", {"quads_kernel<zero::cuda::SumParts>"}},
      {"convert", {"quads_kernel<zero::cuda::SumParts>"}},
      {"copy", {}},
      {"accumulate", {"quads_kernel<zero::cuda::Accumulate>"}},
      {"scale", {"quads_kernel<zero::cuda::Scale>"}},
      {"sums_of_squares", {"square_pieces_kernel", "add_pieces_kernel", "square_pieces_kernel", "add_pieces_kernel"}},
      {"first_non_finite", {"non_finite_kernel"}},
      {"update_by_norm", {"update_kernel<zero::cuda::Lion>", "update_kernel<zero::cuda::Lion>"}},
      {"add_sums", {"add_sums_kernel"}},
      {"step_norm", {"step_norm_kernel"}},
      {"update", {"update_kernel<zero::cuda::Adam<false, false> >", "update_kernel<zero::cuda::Adam<false, false> >"}}};
  for (const auto& [name, call] : functions()) {
    SCOPED_TRACE(name);
    stub().clear();
    EXPECT_EQ(call({0, nullptr}), 0);
    EXPECT_EQ(kernels_launched(), expected.at(name));
    for (const auto& launch : launches()) expect_legal(launch);
  }
  // Of one dtype: a copy, and nothing if it is in place. A factor of 1: nothing.
  stub().clear();
  EXPECT_EQ(functions().at("copy")({0, kStream}), 0);
  EXPECT_EQ(functions_called(), (Names{"GetDevice", "MemcpyAsync"}));
  stub().clear();
  EXPECT_EQ(table().convert({0, nullptr}, address(0), Dtype::F32, address(0), Dtype::F32, kNumel), 0);
  EXPECT_EQ(table().scale({0, nullptr}, address(0), Dtype::F32, 1.0f, kNumel), 0);
  EXPECT_EQ(functions_called(), Names{});
}

// One launch has a table of 512 vectors or of 256 ranges.
TEST_F(GpuLaunches, ManyVectorsNeedALaunchForEachTable) {
  for (auto [count, tables] : {std::pair{0, 0}, {1, 1}, {512, 1}, {513, 2}, {1024, 2}, {1025, 3}}) {
    stub().clear();
    EXPECT_EQ(squares({0, nullptr}, vectors_of(count, kNumel)), 0);
    EXPECT_EQ(launches().size(), 2u * static_cast<unsigned>(tables)) << count << " vectors";
  }
  for (auto [count, tables] : {std::pair{0, 0}, {1, 1}, {256, 1}, {257, 2}, {512, 2}, {513, 3}}) {
    stub().clear();
    EXPECT_EQ(update({0, nullptr}, std::vector<SizedRange>(static_cast<std::size_t>(count), range_of(0, kNumel))), 0);
    EXPECT_EQ(launches().size(), static_cast<unsigned>(tables)) << count << " ranges";
  }
}

TEST_F(GpuLaunches, BlocksCoverEveryElementOfElementwiseKernels) {
  for (const auto numel : kNumels) {
    for (const bool aligned : {true, false}) {
      SCOPED_TRACE(std::to_string(numel) + (aligned ? " aligned" : " not aligned"));
      const std::string kernel = aligned ? "quads_kernel<" : "elements_kernel<";
      const auto expect_launch = [&](const std::string& body, const std::function<int()>& call,
                                     const std::function<void(const void*)>& check) {
        stub().clear();
        bool seen = false;
        stub().on_launch = [&](const StubCall&, void** arguments) {
          seen = true;
          EXPECT_EQ(*static_cast<std::int64_t*>(arguments[1]), numel);
          check(arguments[0]);
        };
        EXPECT_EQ(call(), 0);
        EXPECT_TRUE(seen);
        EXPECT_EQ(kernels_launched(), Names{kernel + "zero::cuda::" + body + ">"});
        expect_covers(numel, aligned ? cuda::kQuad : 1);
      };
      for (const auto in_dtype : kDtypes)
        for (const auto out_dtype : kDtypes) {
          // One of the two is not aligned; a part behind the others is enough.
          char* const out = address(0, aligned || in_dtype != Dtype::F32 ? 0 : out_dtype == Dtype::F32 ? 4 : 2);
          char* const in = address(1, aligned || out != address(0) ? 0 : 2);
          const void* parts[] = {address(2), address(3), in};
          expect_launch(
              "SumParts",
              [&] {
                return table().sum_parts({0, kStream}, out, out_dtype, parts, 3, in_dtype, numel);
              },
              [&](const void* argument) {
                const auto& body = *static_cast<const cuda::SumParts*>(argument);
                EXPECT_EQ(body.out, out);
                EXPECT_EQ(body.out_dtype, out_dtype);
                EXPECT_EQ(body.in_dtype, in_dtype);
                ASSERT_EQ(body.parts.count, 3);
                for (int p = 0; p < 3; ++p) EXPECT_EQ(body.parts.of[p], parts[p]);
              });
          expect_launch(
              "Accumulate",
              [&] {
                return table().accumulate({0, kStream}, out, out_dtype, in, in_dtype, numel);
              },
              [&](const void* argument) {
                const auto& body = *static_cast<const cuda::Accumulate*>(argument);
                EXPECT_EQ(body.to, out);
                EXPECT_EQ(body.to_dtype, out_dtype);
                EXPECT_EQ(body.in, in);
                EXPECT_EQ(body.in_dtype, in_dtype);
              });
        }
      for (const auto dtype : kDtypes) {
        char* const data = address(0, aligned ? 0 : dtype == Dtype::F32 ? 8 : 4);
        expect_launch(
            "Scale",
            [&] {
              return table().scale({0, kStream}, data, dtype, 0.75f, numel);
            },
            [&](const void* argument) {
              const auto& body = *static_cast<const cuda::Scale*>(argument);
              EXPECT_EQ(body.data, data);
              EXPECT_EQ(body.dtype, dtype);
              EXPECT_EQ(body.factor, 0.75f);
            });
        stub().clear();
        auto* const result = reinterpret_cast<std::int64_t*>(address(1));
        EXPECT_EQ(table().first_non_finite({0, kStream}, data, dtype, numel, result), 0);
        expect_covers(numel, 1);
      }
    }
  }
}

// No elements: no call of the runtime, but a sum of squares and a search have a result to write.
TEST_F(GpuLaunches, NoElementsLaunchNothingThatReads) {
  const Place place{1, kStream};
  const void* part = address(1);
  EXPECT_EQ(table().sum_parts(place, address(0), Dtype::F32, &part, 1, Dtype::BF16, 0), 0);
  EXPECT_EQ(table().convert(place, address(0), Dtype::F32, address(1), Dtype::BF16, 0), 0);
  EXPECT_EQ(table().convert(place, address(0), Dtype::F32, address(1), Dtype::F32, 0), 0);
  EXPECT_EQ(table().accumulate(place, address(0), Dtype::F32, address(1), Dtype::BF16, 0), 0);
  EXPECT_EQ(table().scale(place, address(0), Dtype::F32, 0.5f, 0), 0);
  EXPECT_EQ(functions_called(), Names{});
  EXPECT_EQ(update(place, {range_of(0, 0), range_of(5, 0)}), 0);
  EXPECT_EQ(squares(place, {}), 0);
  EXPECT_EQ(kernels_launched(), Names{});
  EXPECT_EQ(squares(place, vectors_of(2, 0)), 0);
  EXPECT_EQ(kernels_launched(), Names{"add_pieces_kernel"});
  stub().clear();
  auto* const result = reinterpret_cast<std::int64_t*>(address(1));
  EXPECT_EQ(table().first_non_finite({0, kStream}, address(0), Dtype::F32, 0, result), 0);
  EXPECT_EQ(functions_called(), (Names{"GetDevice", "MemsetAsync"}));
}

TEST_F(GpuLaunches, WrongNumbersAreErrorsWithoutALaunch) {
  const Place place{0, kStream};
  const std::vector<const void*> parts(cuda::kMaxParts + 1, address(1));
  const auto sum = [&](int count) {
    return table().sum_parts(place, address(0), Dtype::F32, parts.data(), count, Dtype::BF16, kNumel);
  };
  EXPECT_EQ(sum(0), kInvalidValue);
  EXPECT_EQ(sum(cuda::kMaxParts + 1), kInvalidValue);
  auto* const result = reinterpret_cast<std::int64_t*>(address(1));
  for (const std::int64_t numel : {std::int64_t{-1}, cuda::kMostNumel + 1}) {
    EXPECT_EQ(table().accumulate(place, address(0), Dtype::F32, address(1), Dtype::F32, numel), kInvalidValue);
    EXPECT_EQ(table().scale(place, address(0), Dtype::F32, 0.5f, numel), kInvalidValue);
    EXPECT_EQ(table().first_non_finite(place, address(0), Dtype::F32, numel, result), kInvalidValue);
  }
  EXPECT_EQ(table().convert(place, address(0), Dtype::F32, address(1), Dtype::F32, -1), kInvalidValue);
  EXPECT_EQ(squares(place, vectors_of(1, -1)), kInvalidValue);
  EXPECT_EQ(squares(place, vectors_of(1, (cuda::kMostBlocks + 1) * cuda::kSquarePiece)), kInvalidValue);
  EXPECT_EQ(update(place, {range_of(0, -1)}), kInvalidValue);
  EXPECT_EQ(update(place, {range_of(0, (cuda::kMostBlocks + 1) * cuda::kUpdatedPerBlock)}), kInvalidValue);
  EXPECT_EQ(kernels_launched(), Names{});
  EXPECT_EQ(sum(cuda::kMaxParts), 0);
  EXPECT_EQ(launches().size(), 1u);
}

// Every piece of every vector has one warp of one launch, and one place of the scratch memory.
TEST_F(GpuLaunches, SumsOfSquaresHaveAWarpForEachPiece) {
  std::vector<cuda::SquaredVector> vectors;
  std::int64_t total = 0;
  for (int v = 0; v < 700; ++v) {  // in two launches
    const std::int64_t numel = v % 100 == 7 ? 0 : v < 500 ? kNumels[v % 5] : kNumels[v % 2];
    vectors.push_back({address(v % 64), kDtypes[v % 3], numel, reinterpret_cast<double*>(address(70)) + v});
  }
  for (const int v : {3, 511, 600}) vectors[static_cast<std::size_t>(v)].numel = kNumels[v % 2 == 0 ? 5 : 6];
  for (const auto& vector : vectors) total += cuda::square_pieces(vector.numel);
  std::vector<int> found(static_cast<std::size_t>(total));
  std::size_t first_vector = 0;
  std::int64_t scratch = 0, pieces = 0;
  stub().on_launch = [&](const StubCall& launch, void** arguments) {
    const auto& squares = *static_cast<const cuda::Squares*>(arguments[0]);
    ASSERT_LE(squares.count, cuda::kMaxSquared);
    const auto* const base = reinterpret_cast<double*>(address(900));
    if (launch.kernel == "add_pieces_kernel") {
      EXPECT_EQ(launch.grid[0], static_cast<unsigned>(squares.count));
      EXPECT_EQ(launch.block[0], static_cast<unsigned>(cuda::kSquareLanes));
      first_vector += static_cast<std::size_t>(squares.count);
      scratch += squares.num_pieces;
      return;
    }
    EXPECT_EQ(launch.block[0], static_cast<unsigned>(cuda::kSquareWarps * cuda::kSquareLanes));
    EXPECT_EQ(launch.grid[0], (squares.num_pieces + cuda::kSquareWarps - 1) / cuda::kSquareWarps);
    EXPECT_EQ(squares.pieces, base + scratch);
    for (int t = 0; t < squares.count; ++t) {
      const auto& task = squares.tasks[t].vector;
      const auto& vector = vectors.at(first_vector + static_cast<std::size_t>(t));
      EXPECT_EQ(task.in, vector.in);
      EXPECT_EQ(task.dtype, vector.dtype);
      EXPECT_EQ(task.numel, vector.numel);
      EXPECT_EQ(task.result, vector.result);
    }
    for (unsigned piece = 0; piece < squares.num_pieces; ++piece) {
      const auto& task = squares.tasks[cuda::task_of(squares.tasks, squares.count, piece)];
      ASSERT_GE(piece, task.first_block);
      ASSERT_LT((piece - task.first_block) * cuda::kSquarePiece, task.vector.numel);
      ++found.at(static_cast<std::size_t>(squares.pieces - base) + piece);
      ++pieces;
    }
  };
  EXPECT_EQ(squares({0, kStream}, vectors), 0);
  EXPECT_EQ(launches().size(), 4u);
  EXPECT_EQ(first_vector, vectors.size());
  EXPECT_EQ(pieces, total);
  EXPECT_EQ(std::count(found.begin(), found.end(), 1), total);
}

namespace {

template <class Algorithm>
void expect_updates(Rule rule, const std::string& name) {
  std::vector<SizedRange> ranges;
  for (int r = 0; r < 300; ++r) {  // in two launches, the second with the rest
    auto range = range_of(0, r % 50 == 9 ? 0 : r < 260 ? kNumels[r % 5] : kNumels[r % 2], kDtypes[r % 3]);
    range.range.master = floats(0) + 4 * r;
    if (r % 7 == 0) range.range.parameter = nullptr;
    ranges.push_back(range);
  }
  ranges[1].numel = kNumels[5];
  ranges[299].numel = kNumels[6];
  // Each is enough to be updated element by element; slots only if the rule has them.
  const auto move = [](void*& data) { data = static_cast<float*>(data) + 1; };
  move(ranges[20].range.master);
  ranges[21].range.gradient = address(3, 2);
  ranges[22].range.parameter = address(4, 2);
  for (const int slot : {0, 1, 2}) move(ranges[static_cast<std::size_t>(23 + slot)].range.slots[slot]);
  const auto aligned = [](std::size_t r) {
    return !((r >= 20 && r <= 22) || (r == 23 && Algorithm::kSlots > 0) || (r == 24 && Algorithm::kSlots > 1) ||
             (r == 25 && Algorithm::kSlots > 2));
  };
  std::vector<std::size_t> filled;
  for (std::size_t r = 0; r < ranges.size(); ++r)
    if (ranges[r].numel > 0) filled.push_back(r);
  std::size_t next = 0;
  stub().on_launch = [&](const StubCall& launch, void** arguments) {
    expect_legal(launch);
    EXPECT_EQ(launch.block[0], static_cast<unsigned>(cuda::kThreads));
    const auto& updates = *static_cast<const cuda::Updates<Algorithm>*>(arguments[0]);
    EXPECT_EQ(updates.factor, 0.5f);
    EXPECT_EQ(updates.algorithm.negative_step, -0.25f);
    ASSERT_LE(updates.count, cuda::kMaxUpdated);
    std::vector<std::int64_t> blocks(static_cast<std::size_t>(updates.count));
    for (unsigned block = 0; block < launch.grid[0]; ++block) {
      const auto t = cuda::task_of(updates.tasks, updates.count, block);
      const auto& task = updates.tasks[t];
      // The block's first element is the one behind the last of the block before.
      ASSERT_EQ(block - task.first_block, blocks[static_cast<std::size_t>(t)]++);
      ASSERT_LT(static_cast<std::int64_t>(block - task.first_block) * cuda::kUpdatedPerBlock, task.numel);
    }
    for (int t = 0; t < updates.count; ++t) {
      const auto& task = updates.tasks[t];
      ASSERT_LT(next, filled.size());
      const auto& [range, numel] = ranges[filled[next]];
      EXPECT_GE(blocks[static_cast<std::size_t>(t)] * cuda::kUpdatedPerBlock, numel);
      EXPECT_EQ(task.numel, numel);
      EXPECT_EQ(task.range.master, range.master);
      EXPECT_EQ(task.range.gradient, range.gradient);
      EXPECT_EQ(task.range.gradient_dtype, range.gradient_dtype);
      EXPECT_EQ(task.range.parameter, range.parameter);
      EXPECT_EQ(task.range.slots[0], range.slots[0]);
      EXPECT_EQ(task.range.slots[1], range.slots[1]);
      EXPECT_EQ(task.range.slots[2], range.slots[2]);
      EXPECT_EQ(task.aligned, aligned(filled[next])) << "range " << filled[next];
      ++next;
    }
  };
  EXPECT_EQ(update({0, kStream}, ranges, rule), 0);
  EXPECT_EQ(next, filled.size());
  EXPECT_EQ(kernels_launched(), Names(2, "update_kernel<zero::cuda::" + name + ">"));
}

}  // namespace

TEST_F(GpuLaunches, UpdatesOfEveryRuleCoverEveryElementOnce) {
  expect_updates<cuda::Adam<false, false>>(Rule::AdamDecoupled, "Adam<false, false> ");
  stub().clear();
  expect_updates<cuda::Adam<true, false>>(Rule::AdamL2, "Adam<true, false> ");
  stub().clear();
  expect_updates<cuda::Sgd<false>>(Rule::Sgd, "Sgd<false> ");
  stub().clear();
  expect_updates<cuda::Sgd<true>>(Rule::SgdMomentum, "Sgd<true> ");
  stub().clear();
  expect_updates<cuda::Adagrad>(Rule::Adagrad, "Adagrad");
  stub().clear();
  expect_updates<cuda::Lion>(Rule::Lion, "Lion");
  stub().clear();
  expect_updates<cuda::Adam<true, true>>(Rule::AmsgradL2, "Adam<true, true> ");
  stub().clear();
  expect_updates<cuda::RmsProp<true, true>>(Rule::RmsPropCenteredMomentum, "RmsProp<true, true> ");
  stub().clear();
  expect_updates<cuda::NAdam>(Rule::NAdam, "NAdam");
}

TEST_F(GpuLaunches, WorkGoesToTheGivenStreamAndDevice) {
  for (const auto& [name, call] : functions()) {
    for (const int current : {0, 1}) {
      SCOPED_TRACE(name + ", current device " + std::to_string(current));
      stub().clear();
      stub().current_device = current;
      EXPECT_EQ(call({1, kStream}), 0);
      int enqueued = 0;
      std::vector<int> set;
      for (const auto& one : stub().calls) {
        if (one.function == "SetDevice") set.push_back(one.device);
        if (one.function != "LaunchKernel" && one.function.find("Async") == std::string::npos) continue;
        ++enqueued;
        EXPECT_EQ(one.stream, kStream) << one.function;
        EXPECT_EQ(one.device, 1) << one.function;
      }
      EXPECT_GE(enqueued, 1);
      EXPECT_EQ(set, current == 0 ? (std::vector<int>{1, 0}) : std::vector<int>{});
      EXPECT_EQ(stub().current_device, current);
    }
    SCOPED_TRACE(name + ", a device that does not exist");
    stub().clear();
    EXPECT_EQ(call({5, kStream}), 101);
    EXPECT_EQ(kernels_launched(), Names{});
    EXPECT_EQ(call({1, kStream}), 0) << "the error before was not this call's";
  }
}

// A function of the table with one failing call returns its error, leaves the caller's device, and works the next time.
// If the caller's device cannot be restored, the work is enqueued, and the next call returns the error.
TEST_F(GpuLaunches, TheErrorOfEveryCallIsReturnedOnce) {
  auto all = functions();
  all["device_count"] = [](Place) {
    int count = 0;
    return table().device_count(&count);
  };
  for (const auto& [name, call] : all) {
    stub().clear();
    ASSERT_EQ(call({1, kStream}), 0);  // this asks for the kernels, which happens once
    stub().clear();
    ASSERT_EQ(call({1, kStream}), 0);
    const auto whole = functions_called();
    ASSERT_FALSE(whole.empty());
    for (std::size_t n = 0; n < whole.size(); ++n) {
      SCOPED_TRACE(name + ", call " + std::to_string(n) + ": " + whole[n]);
      stub().clear();
      stub().fail_at = static_cast<int>(n);
      stub().error = 700 + static_cast<int>(n);
      const bool restores = whole[n] == "SetDevice" && n > 1;
      EXPECT_EQ(call({1, kStream}), restores ? 0 : stub().error);
      EXPECT_EQ(stub().current_device, restores ? 1 : 0);
      stub().current_device = 0;
      stub().fail_at = -1;
      if (restores) {
        EXPECT_EQ(functions().at("scale")({1, kStream}), stub().error);
      }
      stub().calls.clear();
      EXPECT_EQ(call({1, kStream}), 0);
      EXPECT_EQ(functions_called(), whole);
    }
  }
}

// nvcc's code asks for a kernel once, at its first launch; what it was not given then is an error at every launch.
TEST_F(GpuLaunches, AKernelThatIsNotFoundIsAnErrorAtEveryLaunch) {
  const TempFolder folder;
  std::filesystem::copy(plugin_path(), folder.path() / "another.so");
  const auto& fresh = open_plugin(folder.path() / "another.so");
  stub().clear();
  const auto scale = [&] { return fresh.scale({0, kStream}, address(0), Dtype::F32, 0.5f, kNumel); };
  const Names expected{"GetDevice",    "PushCallConfiguration", "GetKernel", "PopCallConfiguration",
                       "LaunchKernel", "GetLastError"};
  stub().fail_at = 2;
  stub().error = 98;
  bool launched = false;
  stub().on_launch = [&](const StubCall&, void**) { launched = true; };
  EXPECT_NE(scale(), 0);
  EXPECT_EQ(functions_called(), expected);
  EXPECT_EQ(scale(), StubCudart::kInvalidKernel);
  EXPECT_FALSE(launched);
  EXPECT_EQ(fresh.accumulate({0, kStream}, address(0), Dtype::F32, address(1), Dtype::F32, kNumel), 0);
  EXPECT_TRUE(launched) << "another kernel";
}

// Not rounded up to a power of two; on the given device, so that no other is opened.
TEST_F(GpuLaunches, PinnedMemoryIsAsLargeAsAskedFor) {
  constexpr std::size_t kBytes = (std::size_t{5} << 20) + 100;
  void* data = nullptr;
  stub().clear();
  ASSERT_EQ(table().allocate_host(1, kBytes, &data), 0);
  ASSERT_EQ(functions_called(), (Names{"GetDevice", "SetDevice", "HostRegister", "SetDevice"}));
  EXPECT_EQ(stub().calls[2].shared, kBytes);
  EXPECT_EQ(stub().calls[2].device, 1);
  static_cast<char*>(data)[0] = static_cast<char*>(data)[kBytes - 1] = 1;
  stub().clear();
  EXPECT_EQ(table().free_host(0, data, kBytes), 0);
  EXPECT_EQ(functions_called(), (Names{"GetDevice", "HostUnregister"}));
  stub().clear();
  stub().fail_at = 1;
  stub().error = 2;
  void* none = nullptr;
  EXPECT_EQ(table().allocate_host(0, kBytes, &none), 2);
  EXPECT_EQ(none, nullptr);
  stub().clear();
  EXPECT_NE(table().allocate_host(0, std::size_t{1} << 62, &none), 0) << "more than there is";
}

// What the simulated GPU does not run: that the kernels get what the functions were given.
TEST_F(GpuLaunches, TheNormsArgumentsReachItsKernels) {
  const auto run = [](const std::string& name, const std::function<void(void**)>& check) {
    stub().clear();
    int seen = 0;
    stub().on_launch = [&](const StubCall&, void** arguments) {
      ++seen;
      check(arguments);
    };
    EXPECT_EQ(functions().at(name)({0, kStream}), 0) << name;
    EXPECT_GE(seen, 1) << name;
  };
  run("update_by_norm", [](void** arguments) {
    const auto& updates = *static_cast<const cuda::Updates<cuda::Lion>*>(arguments[0]);
    EXPECT_EQ(updates.norm, reinterpret_cast<cuda::StepNorm*>(address(9)));
    EXPECT_GE(updates.count, 1);
  });
  run("update", [](void** arguments) {
    using Updates = cuda::Updates<cuda::Adam<false, false>>;
    EXPECT_EQ(static_cast<const Updates*>(arguments[0])->norm, nullptr);
  });
  run("add_sums", [](void** arguments) {
    EXPECT_EQ(*static_cast<const double**>(arguments[0]), reinterpret_cast<const double*>(address(1)));
    const auto& order = *static_cast<const cuda::Order*>(arguments[1]);
    ASSERT_EQ(order.count, 5);
    EXPECT_EQ(std::vector<int>(order.of, order.of + 5), (std::vector<int>{0, 1, -1, 2, -1}));
    EXPECT_EQ(*static_cast<const std::uint64_t*>(arguments[2]), 7u);
    EXPECT_EQ(*static_cast<double**>(arguments[3]), reinterpret_cast<double*>(address(2)));
  });
  run("step_norm", [](void** arguments) {
    EXPECT_EQ(*static_cast<const double**>(arguments[0]), reinterpret_cast<const double*>(address(1)));
    EXPECT_EQ(*static_cast<const int*>(arguments[1]), 2);
    const auto& settings = *static_cast<const cuda::NormSettings*>(arguments[2]);
    EXPECT_EQ((std::vector<double>{settings.scale, settings.clip, settings.postmultiply}),
              (std::vector<double>{8, 0.5, 0.25}));
    EXPECT_EQ(settings.checks_overflow, 1);
    EXPECT_EQ(*static_cast<cuda::StepNorm**>(arguments[3]), reinterpret_cast<cuda::StepNorm*>(address(2)));
  });
  stub().clear();
  const std::vector<int> long_order(cuda::kMaxOrder + 1, -1);
  EXPECT_NE(table().add_sums({0, nullptr}, reinterpret_cast<const double*>(address(1)), long_order.data(),
                             cuda::kMaxOrder + 1, 7, reinterpret_cast<double*>(address(2))),
            0);
  EXPECT_TRUE(launches().empty());
}

// The first folder of its RUNPATH is its own.
TEST_F(GpuLaunches, TheRuntimeIsLookedForNextToThePlugin) {
  const auto bytes = file_text(plugin_path());
  EXPECT_NE(bytes.find(std::string("\0$ORIGIN:", 9)), std::string::npos);
}

TEST_F(GpuLaunches, ErrorsHaveTheRuntimesTexts) {
  EXPECT_STREQ(table().error_text(719), "stub error 719");
  int count = 0;
  EXPECT_EQ(table().device_count(&count), 0);
  EXPECT_EQ(count, StubCudart::kDevices);
}

}  // namespace zero::test::launches_test
