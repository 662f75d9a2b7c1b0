// Tokenizers from small files: what each reader takes, and what it refuses in which words. Equality with other
// libraries on real text: tests/data/tokenizers_test.py.
#include <gtest/gtest.h>

#include <fstream>

#include "apps/data/tokenizers/charsmap.h"
#include "apps/data/tokenizers/pattern.h"
#include "apps/data/tokenizers/tokenizer.h"
#include "support/folder.h"

namespace tokenizer_files_test {
namespace {

using Ids = std::vector<std::int32_t>;

class TokenizersTest : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& content) {
    std::ofstream(folder_.file(name), std::ios::binary) << content;
  }
  std::unique_ptr<data::Tokenizer> load() { return data::load_tokenizer(folder_.text()); }
  std::string error() {
    try {
      (void)load();
    } catch (const std::runtime_error& e) {
      return e.what();
    }
    return "";
  }
  std::string error_of(const std::string& json) {
    write("tokenizer.json", json);
    return error();
  }
  const zero::test::TempFolder folder_;
};

constexpr const char* kBpe =
    R"("model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4}, "merges": ["a b", ["Ġ", "ab"]]})";

std::string with(const std::string& part) { return "{" + part + (part.empty() ? "" : ", ") + kBpe + "}"; }

TEST_F(TokenizersTest, ByteLevelBpeJoinsTheFirstMergeFirst) {
  write("tokenizer.json", with(R"("pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
    "decoder": {"type": "ByteLevel"}, "truncation": {"max_length": 1}, "padding": null,
    "added_tokens": [{"id": 5, "content": "<end>", "special": true}])"));
  const auto tokenizer = load();
  EXPECT_EQ(tokenizer->encode("ab ab<end>ba"), (Ids{3, 4, 5, 1, 0}));
  const auto encoding = tokenizer->encode_with_offsets("ab ab<end>");
  EXPECT_EQ(encoding.offsets, (std::vector<data::ByteRange>{{0, 2}, {2, 5}, {5, 10}}));
  EXPECT_EQ(tokenizer->decode(Ids{3, 4, 5}), "ab ab<end>");
  EXPECT_EQ(tokenizer->decode(Ids{3, 4, 5}, true), "ab ab");
  EXPECT_EQ(tokenizer->vocabulary(), 6);
  EXPECT_EQ(tokenizer->id_of("Ġab"), 4);
  EXPECT_EQ(tokenizer->token_of(5), "<end>");
  EXPECT_TRUE(tokenizer->is_special(5));
  EXPECT_FALSE(tokenizer->is_special(3));
  EXPECT_THROW((void)tokenizer->decode(Ids{6}), std::out_of_range);
  EXPECT_THROW((void)tokenizer->decode(Ids{-1}), std::out_of_range);
  EXPECT_THROW((void)tokenizer->encode("a\xff"), std::invalid_argument);
  EXPECT_EQ(tokenizer->description(), "byte-level BPE, 6 tokens");
}

TEST_F(TokenizersTest, DigestsTellTokenizersApart) {
  write("tokenizer.json", with(""));
  const auto first = load()->digest();
  EXPECT_EQ(load()->digest(), first);
  write("tokenizer.json", with(R"("normalizer": {"type": "Lowercase"})"));
  EXPECT_NE(load()->digest(), first);
}

TEST_F(TokenizersTest, BertWritesTypesAndSpecialTokens) {
  write("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nwho\n##s\n?\nann\n");
  const auto tokenizer = load();
  const auto pair = tokenizer->encode_pair("Whos?", "\u00c1nn [MASK]x");
  EXPECT_EQ(pair.ids, (Ids{2, 5, 6, 7, 3, 8, 4, 1, 3}));
  EXPECT_EQ(pair.types, (std::vector<std::uint8_t>{0, 0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(pair.offsets[5], (data::ByteRange{0, 4}));
  EXPECT_EQ(pair.texts[4], data::Encoding::kAdded);
  EXPECT_EQ(tokenizer->special().separator, 3);
  EXPECT_EQ(tokenizer->special().mask, 4);
  EXPECT_EQ(tokenizer->decode(pair.ids, true), "whos? ann");
  EXPECT_EQ(tokenizer->encode(std::string(101, 'a')), (Ids{2, 1, 3}));
}

TEST_F(TokenizersTest, UnsupportedComponentsAreNamed) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {R"("normalizer": {"type": "ByteLevel"})",
       "/normalizer: got the normalizer \"ByteLevel\", which is not supported"},
      {R"("normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "New"}]})",
       "/normalizer/normalizers/1"},
      {R"("normalizer": {"type": "NFC", "form": 1})", "the unknown key \"form\""},
      {R"("pre_tokenizer": {"type": "UnicodeScripts"})", "the pre-tokenizer \"UnicodeScripts\""},
      {R"("pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]})",
       "behind ByteLevel"},
      {R"j("pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?<x>a)"}, "behavior": "Isolated"})j",
       "the group (?<x"},
      {R"("pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Sideways"})", "\"Sideways\""},
      {R"("post_processor": {"type": "Later"})", "the post-processor \"Later\""},
      {R"("decoder": {"type": "CTC"})", "the decoder \"CTC\""},
      {R"("later": 1)", "the unknown key \"later\""},
      {R"("added_tokens": [{"id": 3, "content": "x"}])", "the added token \"x\" with id 3"},
      {R"("added_tokens": [{"id": 7, "content": "ab"}])", "the added token \"ab\" with id 7"},
      {R"("added_tokens": [{"id": 2000000, "content": "x"}])", "an added token with id"},
      {R"("post_processor": {"type": "BertProcessing", "sep": ["x", 9], "cls": ["y", 1]})", "a template with id 9"},
      {R"("normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"})", "charsmap"},
      {R"("normalizer": {"type": "Precompiled", "precompiled_charsmap": "\u00e9"})", "base64"},
  };
  for (const auto& [part, expected] : cases) {
    const auto error = error_of(with(part));
    EXPECT_NE(error.find(expected), std::string::npos) << part << "\n" << error;
    EXPECT_EQ(error.find("[tokenizer "), 0u) << error;
  }
}

TEST_F(TokenizersTest, WrongModelsAreRefused) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {R"({"model": {"type": "WordLevel", "vocab": {}}})", "the model \"WordLevel\""},
      {R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}})", "the second part is no token"},
      {R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a"]}})", "the result is no token"},
      {R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}})", "the id 0 twice"},
      {R"({"model": {"type": "BPE", "vocab": {"a": 0, "a": 1}, "merges": []}})", "the key \"a\" twice"},
      {R"({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}})", "the id -1"},
      {R"({"model": {"type": "BPE", "vocab": {"a": 9000000}, "merges": []}})", "ids up to 9000000 for 1 tokens"},
      {R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}})", "a merge of another form"},
      {R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.1}})", "a dropout"},
      {R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "u"}})", "unknown token \"u\""},
      {R"({"model": {"type": "WordPiece", "vocab": {"a": 0}}})", "unknown token \"[UNK]\""},
      {R"({"model": {"type": "Unigram", "vocab": [["a", 1], ["a", 2]], "unk_id": 0}})", "the token \"a\" twice"},
      {R"({"model": {"type": "Unigram", "vocab": [["a", "b"]]}})", "a token and its score"},
      {R"({"model": {"type": "Unigram", "vocab": [["a", 1]], "unk_id": 1}})", "the unknown token 1"},
      {R"({"model": {"type": "BPE", "vocab": [], "merges": []}})", "an object of tokens"},
      {"{\"model\": 1}", "/model"},
      {"[]", "the top level"},
      {"{\n\n\"model\": x}", "tokenizer.json:3"},
      {std::string(100, '['), "levels"},
  };
  for (const auto& [json, expected] : cases)
    EXPECT_NE(error_of(json).find(expected), std::string::npos) << json << "\n" << error();
}

TEST_F(TokenizersTest, FoldersAndVocabulariesAreChecked) {
  EXPECT_NE(error().find("a folder without one"), std::string::npos);
  EXPECT_THROW((void)data::load_tokenizer(folder_.file("none")), std::runtime_error);
  write("vocab.json", R"({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3})");
  write("merges.txt", "#version: 0.2\na b\n");
  EXPECT_EQ(load()->encode("ab<|endoftext|>"), (Ids{2, 3}));
  EXPECT_EQ(load()->special().end, 3);
  write("merges.txt", "a  b\n");
  EXPECT_NE(error().find("merges.txt"), std::string::npos);
  write("merges.txt", "a b\n");
  write("tokenizer_config.json", R"({"tokenizer_class": "CLIPTokenizer"})");
  EXPECT_NE(error().find("the files of a CLIPTokenizer"), std::string::npos);
  write("tokenizer_config.json",
        R"({"tokenizer_class": "GPT2Tokenizer", "eos_token": "ab", "bos_token": "b", "add_bos_token": true})");
  EXPECT_EQ(load()->encode("a"), (Ids{1, 0}));
  write("tokenizer_config.json", R"({"pad_token": "<none>"})");
  EXPECT_NE(error().find("pad_token: got \"<none>\""), std::string::npos);
}

TEST_F(TokenizersTest, DamagedSentencePieceModelsAreRefused) {
  const auto piece = [](const std::string& text, int type) {
    const auto inner = std::string("\x0a") + static_cast<char>(text.size()) + text +
                       std::string("\x15\0\0\x80\xbf\x18", 6) + static_cast<char>(type);
    return std::string("\x0a") + static_cast<char>(inner.size()) + inner;
  };
  const auto good = piece("<unk>", 2) + piece("</s>", 3) + piece("\u2581a", 1) + piece("b", 1);
  write("spiece.model", good);
  const auto tokenizer = load();
  EXPECT_EQ(tokenizer->encode("ab  a z"), (Ids{2, 3, 2, 0, 1}));
  EXPECT_EQ(tokenizer->encode("<extra_id_0>"), (Ids{4 + 99, 1}));
  for (std::size_t size = 0; size < good.size(); ++size) {
    write("spiece.model", good.substr(0, size));
    try {
      (void)load();
    } catch (const std::runtime_error&) {
    }
  }
  write("spiece.model", good + piece("<unk>", 2));
  EXPECT_NE(error().find("two pieces for what is unknown"), std::string::npos);
  write("spiece.model", good + std::string("\x0a\x7f", 2));
  EXPECT_NE(error().find("a field of 127 bytes"), std::string::npos);
  write("spiece.model", good + std::string("\x12\x02\x18\x03", 4));
  EXPECT_NE(error().find("model of type 3"), std::string::npos);
}

TEST(TokenizerParts, PatternsTakeNoMoreThanTheirSteps) {
  EXPECT_THROW(data::Pattern("a^"), std::invalid_argument);
  EXPECT_THROW(data::Pattern("(a"), std::invalid_argument);
  EXPECT_THROW(data::Pattern("[a"), std::invalid_argument);
  EXPECT_THROW(data::Pattern("[[:alpha:]]"), std::invalid_argument);
  EXPECT_THROW(data::Pattern("\\1"), std::invalid_argument);
  EXPECT_THROW(data::Pattern("a{,3}"), std::invalid_argument);
  EXPECT_THROW(data::Pattern(std::string(1000, '(') + std::string(1000, ')')), std::invalid_argument);
  const data::Pattern slow("(?:a+)+[bc]");
  EXPECT_THROW((void)slow.parts(std::string(40, 'a') + "d"), std::runtime_error);
  const auto parts = data::Pattern("\\s+").parts("a \u180e\u0085b");  // U+180E is no space
  ASSERT_EQ(parts.size(), 5u);
  EXPECT_EQ(parts[1].end, 2u);
}

TEST(TokenizerParts, CharsmapsStayInsideTheirTable) {
  std::string table(4 + 64, '\0');
  table[0] = 64;
  EXPECT_EQ(data::Charsmap(table).longest("abc").bytes, 0u);
  for (int i = 0; i < 64; ++i) {  // offsets that lead out of the table
    auto wild = table;
    for (int j = 0; j < 64; ++j) wild[static_cast<std::size_t>(4 + j)] = static_cast<char>(i * 37 + j * 101);
    (void)data::Charsmap(wild).longest("abcdefg");
  }
  EXPECT_THROW(data::Charsmap("ab"), std::invalid_argument);
  EXPECT_THROW(data::Charsmap(std::string("\xff\xff\0\0", 4)), std::invalid_argument);
  EXPECT_EQ(data::base64_decoded("aGVsbG8="), "hello");
}

}  // namespace
}  // namespace tokenizer_files_test
