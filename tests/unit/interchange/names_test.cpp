// Name maps: transformers' GPT-2 becomes ours and its own again; operations against their definitions; maps and tensors
// that do not fit are refused with all faults in one error.
#include "interchange/element_types.h"
#include "interchange/name_pattern.h"
#include "interchange/named_source.h"
#include "interchange/safetensors_source.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::names_test {
namespace {
using namespace zero::interchange;

// A source in memory.
class Memory : public TensorSource {
 public:
  explicit Memory(const PlainTensors& tensors, const std::string& kind = "weight") : plain_(tensors) {
    for (const auto& [name, tensor] : plain_) tensors_.push_back({kind, name, tensor.dtype, tensor.shape});
  }
  const std::string& format() const override { return format_; }
  const std::vector<SourceTensor>& tensors() const override { return tensors_; }
  const std::map<std::string, std::string>& aliases() const override { return aliases_; }
  const std::optional<SourceProgress>& progress() const override { return progress_; }
  const std::vector<std::string>& remarks() const override { return remarks_; }
  void read(const SourceTensor& tensor, std::int64_t begin, std::int64_t numel, void* out) override {
    const auto width = width_of(tensor.dtype);
    largest_read = std::max(largest_read, numel);
    plain_.at(tensor.name)
        .bytes.copy(static_cast<char*>(out), static_cast<std::size_t>(numel * width),
                    static_cast<std::size_t>(begin * width));
  }
  std::int64_t largest_read = 0;

 private:
  PlainTensors plain_;
  std::string format_;
  std::vector<SourceTensor> tensors_;
  std::map<std::string, std::string> aliases_;
  std::optional<SourceProgress> progress_;
  std::vector<std::string> remarks_;
};

PlainTensors all_of(TensorSource& source, std::int64_t step = 0) {
  PlainTensors result;
  for (const auto& tensor : source.tensors()) {
    const auto numel = formats::numel_of(tensor.shape), width = width_of(tensor.dtype);
    std::string bytes(static_cast<std::size_t>(numel * width), 'x');
    const auto window = step == 0 ? numel : step;
    for (std::int64_t at = 0; at < numel; at += window)
      source.read(tensor, at, std::min(window, numel - at), bytes.data() + at * width);
    result[tensor.name] = {tensor.dtype, bytes, tensor.shape};
  }
  return result;
}

PlainTensors mapped(const std::string& map, Direction direction, const PlainTensors& tensors, std::int64_t step = 0) {
  Memory memory(tensors);
  const auto names =
      NameMap::builtin_text(map) != nullptr ? NameMap::find(formats::system_files(), map) : NameMap::parse(map, "map");
  return all_of(*named_source(memory, map_names(names, direction, memory.tensors(), {}, "memory")), step);
}

std::vector<float> counting(std::int64_t numel, float from = 0) {
  std::vector<float> values(static_cast<std::size_t>(numel));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = from + static_cast<float>(i);
  return values;
}
PlainTensor matrix(std::int64_t rows, std::int64_t cols, float from = 0) {
  return plain_tensor<float>("F32", {rows, cols}, counting(rows * cols, from));
}

TEST(Names, Gpt2BecomesOursAndItsOwnAgain) {
  const auto theirs = plain_folder(hf_model("hf-gpt2"));
  const auto ours = mapped("gpt2", Direction::ToOurs, theirs);
  ASSERT_EQ(ours.size(), theirs.size());
  EXPECT_EQ(ours.at("token.weight"), theirs.at("transformer.wte.weight"));
  EXPECT_EQ(ours.at("blocks.1.norm2.bias"), theirs.at("transformer.h.1.ln_2.bias"));
  const auto linear = [&](const std::string& name, const std::string& other, std::int64_t out, std::int64_t in) {
    EXPECT_EQ(ours.at(name).shape, (std::vector<std::int64_t>{out, in})) << name;
    const auto mine = ours.at(name).floats(), conv = theirs.at(other).floats();  // Conv1D: [in, out]
    for (std::int64_t o = 0; o < out; ++o)
      for (std::int64_t i = 0; i < in; ++i)
        ASSERT_EQ(mine[static_cast<std::size_t>(o * in + i)], conv[static_cast<std::size_t>(i * out + o)]) << name;
  };
  for (const std::string layer : {"0", "1"}) {
    linear("blocks." + layer + ".qkv.weight", "transformer.h." + layer + ".attn.c_attn.weight", 24, 8);
    linear("blocks." + layer + ".projection.weight", "transformer.h." + layer + ".attn.c_proj.weight", 8, 8);
    linear("blocks." + layer + ".up.weight", "transformer.h." + layer + ".mlp.c_fc.weight", 32, 8);
    linear("blocks." + layer + ".down.weight", "transformer.h." + layer + ".mlp.c_proj.weight", 8, 32);
  }
  EXPECT_EQ(mapped("gpt2", Direction::ToTheirs, ours), theirs);
  EXPECT_EQ(mapped("gpt2", Direction::ToTheirs, ours, 5), theirs) << "in ranges of 5 elements";
}

TEST(Names, ModelsWithoutHeadsAndMasksOfOldFiles) {
  PlainTensors bare;
  for (const auto& [name, tensor] : plain_folder(hf_model("hf-gpt2")))
    bare[name.substr(std::string("transformer.").size())] = tensor;
  bare["h.0.attn.bias"] = bare["h.1.attn.masked_bias"] = matrix(1, 1);
  EXPECT_EQ(mapped("gpt2", Direction::ToOurs, bare),
            mapped("gpt2", Direction::ToOurs, plain_folder(hf_model("hf-gpt2"))));
  const auto bert = plain_folder(hf_model("hf-bert"));
  PlainTensors old;
  for (const auto& [name, tensor] : bert) {
    auto renamed = name;
    for (const auto& [now, then] :
         {std::pair{"LayerNorm.weight", "LayerNorm.gamma"}, {"LayerNorm.bias", "LayerNorm.beta"}})
      if (const auto at = renamed.find(now); at != std::string::npos)
        renamed.replace(at, std::string(now).size(), then);
    old[renamed] = tensor;
  }
  EXPECT_NE(old, bert);
  EXPECT_EQ(mapped("bert", Direction::ToOurs, old), bert);
  EXPECT_EQ(mapped("bert", Direction::ToTheirs, bert), bert);
}

TEST(Names, TiesOfTheFourModels) {
  const auto ties_of = [](const std::string& map, const std::string& model) {
    const auto source = open_safetensors(formats::system_files(), hf_model(model).string());
    return map_names(
               NameMap::find(formats::system_files(), map), Direction::ToTheirs,
               map == "gpt2" ? std::vector<SourceTensor>{{"master", "token.weight", "F32", {2, 2}}} : source->tensors(),
               {}, model)
        .aliases;
  };
  using Ties = std::map<std::string, std::string>;
  // The names that state_dict() has and the files have not.
  for (const auto& [map, model] :
       {std::pair{"llama", "hf-llama"}, {"llama", "hf-llama-tied"}, {"bert", "hf-bert"}, {"t5", "hf-t5"}}) {
    std::set<std::string> absent, tied;
    const auto stored = plain_folder(hf_model(model));
    for (const auto& [name, tensor] : plain_tensors(hf_model(model) / "expected.safetensors"))
      if (!stored.contains(name.substr(6))) absent.insert(name.substr(6));
    for (const auto& [alias, owner] : ties_of(map, model)) {
      tied.insert(alias);
      EXPECT_TRUE(stored.contains(owner)) << owner;
    }
    EXPECT_EQ(tied, absent) << model;
  }
  EXPECT_EQ(ties_of("gpt2", "hf-gpt2"), (Ties{{"lm_head.weight", "transformer.wte.weight"}}));
  // A model that has the data under the other name of a tie.
  const auto swapped = map_names(NameMap::find(formats::system_files(), "llama"), Direction::ToTheirs,
                                 {{"master", "lm_head.weight", "F32", {2, 2}}, {"master", "z", "F32", {1}}},
                                 {{"model.embed_tokens.weight", "lm_head.weight"}}, "a model");
  EXPECT_EQ(swapped.tensors[0].name, "model.embed_tokens.weight");
  EXPECT_EQ(swapped.aliases, (Ties{{"lm_head.weight", "model.embed_tokens.weight"}}));
}

TEST(Names, JointsAndPermutedHeads) {
  const std::string map = R"({"format": "zero.names/1", "rules": [
      {"ours": "layer.{i}.qkv", "theirs": ["l.{i}.q", "l.{i}.k", "l.{i}.v"], "op": "concat", "shares": [2, 1, 1]},
      {"ours": "layer.{i}.t", "theirs": ["l.{i}.a", "l.{i}.b"], "op": "transpose"},
      {"ours": "rope.{i}", "theirs": "r.{i}", "op": {"permute_heads": 2}}]})";
  const PlainTensors theirs{{"l.7.q", matrix(4, 3)},
                            {"l.7.k", matrix(2, 3, 100)},
                            {"l.7.v", matrix(2, 3, 200)},
                            {"l.0.a", matrix(3, 2)},
                            {"l.0.b", matrix(3, 2, 50)},
                            {"r.12", matrix(12, 2)},
                            {"r.3", plain_tensor<float>("F32", {8}, counting(8))}};
  const auto ours = mapped(map, Direction::ToOurs, theirs);
  ASSERT_EQ(ours.size(), 4u);
  EXPECT_EQ(ours.at("layer.7.qkv").bytes,
            theirs.at("l.7.q").bytes + theirs.at("l.7.k").bytes + theirs.at("l.7.v").bytes);
  EXPECT_EQ(ours.at("layer.7.qkv").shape, (std::vector<std::int64_t>{8, 3}));
  EXPECT_EQ(ours.at("layer.0.t").floats(), (std::vector<float>{0, 2, 4, 1, 3, 5, 50, 52, 54, 51, 53, 55}));
  // transformers' conversion of Llama's original files: view(heads, d / 2, 2, in).transpose(1, 2).
  std::vector<float> halves;
  for (int head = 0; head < 2; ++head)
    for (int half = 0; half < 2; ++half)
      for (int pair = 0; pair < 3; ++pair)
        for (int in = 0; in < 2; ++in) halves.push_back(static_cast<float>(((head * 3 + pair) * 2 + half) * 2 + in));
  EXPECT_EQ(ours.at("rope.12").floats(), halves);
  EXPECT_EQ(ours.at("rope.3").floats(), (std::vector<float>{0, 2, 1, 3, 4, 6, 5, 7}));
  for (const std::int64_t step : {0, 1, 3, 7}) {
    EXPECT_EQ(mapped(map, Direction::ToOurs, theirs, step), ours) << step;
    EXPECT_EQ(mapped(map, Direction::ToTheirs, ours, step), theirs) << step;
  }
}

// 5,000 x 2,000 floats are 40 MB: more than one panel.
TEST(Names, AnEscapedCharacterOfAPatternIsThatCharacter) {
  EXPECT_TRUE(name_matches(R"(a.\*.w)", "a.*.w"));
  EXPECT_FALSE(name_matches(R"(a.\*.w)", "a.b.w"));
  EXPECT_TRUE(name_matches(R"(*.\{i}.w)", "a.{i}.w"));
  EXPECT_FALSE(name_matches(R"(*.\{i}.w)", "a.3.w"));
  EXPECT_TRUE(name_matches(R"(a\\*)", R"(a\b)"));
  EXPECT_TRUE(name_matches(R"(a\b)", R"(a\b)"));
  EXPECT_EQ(captures_of(R"(\*.{i}.\{j})"), std::set<std::string>{"{i}"});
  EXPECT_EQ(fill(R"(\*.{i}.\{j})", *match(R"(x.{i}\*)", "x.7*")), "*.7.{j}");
}

TEST(Names, LargeTensorsAreTransposedInPanels) {
  Memory memory({{"x", matrix(5000, 2000)}});
  const auto map = NameMap::parse(
      R"({"format": "zero.names/1", "rules": [{"ours": "y", "theirs": "x", "op": "transpose"}]})", "map");
  const auto view = named_source(memory, map_names(map, Direction::ToOurs, memory.tensors(), {}, "memory"));
  const auto& tensor = view->tensors()[0];
  std::vector<float> window(1 << 20);
  for (std::int64_t at = 0; at < 10000000; at += 1 << 20) {
    const auto count = std::min<std::int64_t>(1 << 20, 10000000 - at);
    view->read(tensor, at, count, window.data());
    for (std::int64_t i = 0; i < count; i += 997)
      ASSERT_EQ(window[static_cast<std::size_t>(i)], static_cast<float>((at + i) % 5000 * 2000 + (at + i) / 5000));
  }
  EXPECT_LE(memory.largest_read, 4 << 20);
}

TEST(Names, EveryFaultInOneError) {
  const std::string map = R"({"format": "zero.names/1", "rules": [
      {"ours": "a.{i}", "theirs": ["x.{i}", "y.{i}"]},
      {"ours": "b", "theirs": "b", "also": ["old_b"], "op": "transpose"},
      {"ours": "c", "theirs": "c", "op": {"permute_heads": 2}}], "ignore": ["*.mask"]})";
  const auto fault = [&](Direction direction, const PlainTensors& tensors) {
    std::string text;
    EXPECT_EQ(code_of([&] { mapped(map, direction, tensors); }, &text), static_cast<int>(ExitCode::kConfig));
    return text;
  };
  const auto text = fault(Direction::ToOurs, {{"x.1", matrix(2, 2)},
                                              {"x.2", matrix(2, 2)},
                                              {"y.2", matrix(2, 3)},
                                              {"x.3", matrix(2, 2)},
                                              {"y.3", matrix(3, 2)},
                                              {"b", matrix(2, 2)},
                                              {"old_b", matrix(2, 2)},
                                              {"c", matrix(6, 2)},
                                              {"stray", matrix(1, 1)},
                                              {"x.01", matrix(1, 1)},
                                              {"h.mask", matrix(1, 1)}});
  EXPECT_NE(text.find("7 faults"), std::string::npos) << text;
  for (const char* part : {"a.1: lacks y.1", "y.2: is weight F32 [2, 3]", "y.3: has 3 rows", "old_b: gives b",
                           "c: has the shape [6, 2]", "stray: no rule", "x.01: no rule"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  EXPECT_EQ(text.find("mask"), std::string::npos) << text;
  const auto other =
      fault(Direction::ToTheirs,
            {{"a.1", matrix(3, 2)}, {"b", plain_tensor<float>("F32", {2}, counting(2))}, {"d", matrix(1, 1)}});
  for (const char* part : {"a.1: has the shape [3, 2]", "b: has the shape [2]", "d: no rule"})
    EXPECT_NE(other.find(part), std::string::npos) << part << " in " << other;
}

TEST(Names, StatesOfTheOptimizerFollowTheirParameters) {
  const std::vector<SourceTensor> tensors{{"master", "blocks.0.up.weight", "F32", {8, 2}},
                                          {"opt.exp_avg", "blocks.0.up.weight", "F32", {8, 2}}};
  const auto mapping =
      map_names(NameMap::find(formats::system_files(), "gpt2"), Direction::ToTheirs, tensors, {}, "a checkpoint");
  ASSERT_EQ(mapping.tensors.size(), 2u);
  for (const auto& tensor : mapping.tensors) {
    EXPECT_EQ(tensor.name, "transformer.h.0.mlp.c_fc.weight");
    EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{2, 8}));
    EXPECT_EQ(tensor.segments[0].source, tensor.kind == "master" ? 0u : 1u);
  }
}

TEST(Names, RefusesMapsThatAreNoTables) {
  const auto rule = [](const std::string& text) { return R"({"format": "zero.names/1", "rules": [)" + text + "]}"; };
  const std::vector<std::pair<std::string, std::string>> bad{
      {"{", "parse error"},
      {R"({"format": "zero.names/2", "rules": []})", "zero.names/1"},
      {rule(""), "empty"},
      {R"({"format": "zero.names/1", "rules": [{"ours": "a", "theirs": "b"}], "rule": []})", "not a field"},
      {rule(R"({"ours": "a"})"), "theirs"},
      {rule(R"({"ours": "a", "theirs": "b", "op": "reverse"})"), "reverse"},
      {rule(R"({"ours": "a", "theirs": "b", "op": {"permute_heads": 0}})"), "heads"},
      {rule(R"({"ours": "a", "theirs": "b", "op": {"permute_heads": 2, "x": 1}})"), "op"},
      {rule(R"({"ours": "a.{i}", "theirs": "b"})"), "other numbers"},
      {rule(R"({"ours": "a.{i}", "theirs": "b.{i}.{j}"})"), "other numbers"},
      {rule(R"({"ours": "*.*", "theirs": "*"})"), "more than one"},
      {rule(R"({"ours": "a", "theirs": []})"), "no tensor"},
      {rule(R"({"ours": "a", "theirs": ["b", "b"]})"), "twice"},
      {rule(R"({"ours": "a", "theirs": ["b", "c"], "shares": [1]})"), "shares"},
      {rule(R"({"ours": "a", "theirs": ["b", "c"], "also": ["d"]})"), "spellings"}};
  for (const auto& [text, part] : bad) {
    std::string error;
    EXPECT_EQ(code_of([&] { (void)NameMap::parse(text, "my.json"); }, &error), static_cast<int>(ExitCode::kConfig))
        << text;
    EXPECT_TRUE(error.find(part) != std::string::npos && error.find("my.json") != std::string::npos) << error;
  }
  std::string error;
  EXPECT_EQ(code_of([&] { (void)NameMap::find(formats::system_files(), "gpt3"); }, &error),
            static_cast<int>(ExitCode::kConfig));
  EXPECT_NE(error.find("gpt2, llama, bert, t5"), std::string::npos) << error;
  for (const auto& name : NameMap::builtin_names())
    EXPECT_FALSE(NameMap::find(formats::system_files(), name).rules().empty());
}

}  // namespace
}  // namespace zero::test::names_test
