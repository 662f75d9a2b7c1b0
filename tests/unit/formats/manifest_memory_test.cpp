// The memory that reading the manifest of a large run takes on each rank.
#include "base/check.h"
#include "support/peak_memory.h"
#include "unit/formats/checkpoint_samples.h"

namespace zero::test::manifest_memory_test {
namespace {
using namespace zero::formats;

constexpr int kRanks = 1024, kUnits = 80, kKinds = 3;

// As 1,024 ranks write it that share 80 units of weights and biases, each with a master and two optimizer states.
Manifest manifest_of_a_large_run() {
  Manifest m;
  m.created = "2000-01-01T00:00:00Z";
  m.optimizer = "AdamW";
  m.slots = {"exp_avg", "exp_avg_sq"};
  m.parameter_dtype = m.gradient_dtype = m.wire_dtype = "F32";
  m.tag = "t";
  m.id = hash_of("id");
  m.config_hash = "x";
  m.world = kRanks;
  m.ranks.resize(kRanks);
  constexpr std::int32_t kOfRank = 196608, kBias = 12288;
  constexpr std::int64_t kHead = 1 << 17;
  const char* const kinds[kKinds] = {"master", "opt.exp_avg", "opt.exp_avg_sq"};
  for (int k = 0; k < kKinds; ++k)
    for (int unit = 0; unit < kUnits; ++unit) {
      const auto place = static_cast<std::int64_t>(k * kUnits + unit) * (kOfRank + kBias);
      const auto name = "transformer.layers." + std::to_string(unit) + ".mlp.";
      Tensor weight{kinds[k], name + "weight", "F32", {kRanks, kOfRank}, true, {}};
      for (int r = 0; r < kRanks; ++r)
        weight.parts.push_back({static_cast<std::uint32_t>(r), kOfRank, static_cast<std::uint64_t>(kHead + 4 * place),
                                std::int64_t{r} * kOfRank});
      m.tensors.push_back(std::move(weight));
      m.tensors.push_back({kinds[k], name + "bias", "F32", {kBias}, true, {}});
      m.tensors.back().parts = {
          {static_cast<std::uint32_t>(unit), kBias, static_cast<std::uint64_t>(kHead + 4 * (place + kOfRank)), 0}};
    }
  constexpr std::int64_t kBytes = kHead + 4 * std::int64_t{kKinds * kUnits} * (kOfRank + kBias);
  for (int r = 0; r < kRanks; ++r) m.files.push_back({rank_file_name(r), kBytes, hash_of(std::to_string(r))});
  m.blocks = kBlocksName;
  m.files.push_back({m.blocks, 100, hash_of("blocks")});
  return m;
}

TEST(ManifestMemory, AtMostTwiceItsBytes) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "this build keeps freed memory for a while";
#endif
  const TempFolder folder(TempFolder::On::Memory);
  const auto in = Folder::open(system_files(), folder.text());
  std::string hash, again;
  std::uint64_t bytes = 0;
  {
    const auto text = manifest_text(manifest_of_a_large_run());
    in.write_file(kManifestName, text);
    hash = hash_of(text);
    bytes = text.size();
  }
  EXPECT_GT(bytes, std::uint64_t{7} << 20);
  const auto before = restart_peak();
  std::size_t parts = 0;
  {
    const auto manifest = read_manifest(in, hash);
    const auto grown = peak_bytes() - before;
    for (const auto& tensor : manifest.tensors) parts += tensor.parts.size();
    EXPECT_LE(grown, 2 * bytes) << "bytes of memory, for a manifest of " << bytes;
    EXPECT_GT(grown, bytes) << "the text alone has them";
    again = manifest_text(manifest);
  }
  EXPECT_EQ(parts, std::size_t{kKinds * kUnits} * (kRanks + 1));
  EXPECT_EQ(hash_of(again), hash);
}

}  // namespace
}  // namespace zero::test::manifest_memory_test
