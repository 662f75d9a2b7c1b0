// Tokenised samples of every task: which tokens are inputs and which are targets, windows and answers of questions, the
// order and the position of a reader.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include "apps/data/examples.h"
#include "support/file_text.h"
#include "support/folder.h"

namespace examples_test {
namespace {

using zero::test::file_text;

using data::kIgnored;
using data::Task;

// WordPiece over a few words; [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4, then the words.
const std::vector<std::string> kWords{"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ann",   "lives",
                                      "in",    "paris", "bob",   "rome",  "who",    "where", "?",
                                      ".",     "and",   "##s",   "x",     "y",      "z"};

class ExamplesTest : public testing::Test {
 protected:
  std::string file(const std::string& name, const std::string& content) {
    const auto path = (folder_.path() / name).string();
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  std::shared_ptr<const data::Tokenizer> bytes() { return data::byte_tokenizer(); }
  std::shared_ptr<const data::Tokenizer> bert() {
    std::string vocabulary;
    for (const auto& word : kWords) vocabulary += word + "\n";
    (void)file("vocab.txt", vocabulary);
    return data::load_tokenizer(folder_.text());
  }
  // As Llama 2's: SentencePiece puts a space before every text, which a word of this vocabulary begins with.
  std::shared_ptr<const data::Tokenizer> llama() {
    std::string vocabulary = R"("<unk>": 0, "<s>": 1, "</s>": 2, "\n": 3, "▁": 4, "▁a": 5, "▁b": 6)";
    int next = 7;
    for (char letter = '!'; letter <= 'z'; ++letter)
      if (letter != '"' && letter != '\\') vocabulary += std::string(", \"") + letter + "\": " + std::to_string(next++);
    std::filesystem::create_directory(folder_.path() / "llama");
    (void)file("llama/tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})");
    (void)file("llama/tokenizer.json",
               R"({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                   {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
                   "post_processor": {"type": "TemplateProcessing",
                     "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                     "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                     "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
                   "added_tokens": [{"id": 0, "content": "<unk>", "special": true},
                     {"id": 1, "content": "<s>", "special": true}, {"id": 2, "content": "</s>", "special": true}],
                   "model": {"type": "BPE", "unk_token": "<unk>", "merges": ["▁ a", "▁ b"], "vocab": {)" +
                   vocabulary + "}}}");
    return data::load_tokenizer((folder_.path() / "llama").string());
  }
  std::int32_t id(const std::string& word) {
    return static_cast<std::int32_t>(std::find(kWords.begin(), kWords.end(), word) - kWords.begin());
  }
  std::vector<std::int32_t> ids(const std::vector<std::string>& words) {
    std::vector<std::int32_t> all;
    for (const auto& word : words) all.push_back(id(word));
    return all;
  }
  const zero::test::TempFolder folder_;
};

std::vector<std::int32_t> codes(const std::string& text) { return {text.begin(), text.end()}; }

template <class Make>
std::string error_of(const Make& make) {
  try {
    make();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

TEST_F(ExamplesTest, PackedTextPredictsTheNextToken) {
  data::ExampleOptions o;
  o.files = {file("a.txt", "abc\ndefgh\n"), file("b.txt", "ij\n")};
  o.sequence = 4;
  o.holdout = 0;
  const data::Examples examples(o, bytes());
  // a b c E d e f g h E i j E: 13 tokens.
  ASSERT_EQ(examples.training_samples(), 3);
  EXPECT_EQ(examples.heldout_samples(), 0);
  std::set<std::vector<std::int32_t>> seen;
  for (int i = 0; i < 3; ++i) {
    const auto sample = examples.training(i);
    ASSERT_EQ(sample.ids.size(), 4u);
    EXPECT_TRUE(std::equal(sample.ids.begin() + 1, sample.ids.end(), sample.labels.begin()));
    EXPECT_EQ(sample.mask, std::vector<std::uint8_t>(4, 1));
    seen.insert(sample.ids);
  }
  const std::set<std::vector<std::int32_t>> expected{{'a', 'b', 'c', 256}, {'d', 'e', 'f', 'g'}, {'h', 256, 'i', 'j'}};
  EXPECT_EQ(seen, expected);
}

TEST_F(ExamplesTest, TheEndOfPackedTextIsHeldOut) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += static_cast<char>('a' + i % 26);
  data::ExampleOptions o;
  o.files = {file("a.txt", text)};
  o.sequence = 10;
  o.holdout = 0.2;
  o.cache = folder_.text();
  const data::Examples examples(o, bytes());
  EXPECT_EQ(examples.training_samples(), (1001 - 200 - 1) / 10);
  ASSERT_EQ(examples.heldout_samples(), 199 / 10);
  const auto held = examples.heldout(0).ids, trained = examples.training(0).ids;
  EXPECT_EQ(held[0], 'a' + 801 % 26);
  // A second one reads the file of tokens; damaged, it is written again.
  std::filesystem::path tokens;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
    if (entry.path().filename().string().starts_with("tokens-")) tokens = entry.path();
  ASSERT_FALSE(tokens.empty());
  EXPECT_EQ(std::filesystem::file_size(tokens), 40u + 2 * 1001);
  std::filesystem::resize_file(tokens, 100);
  EXPECT_EQ(data::Examples(o, bytes()).heldout(0).ids, held);
  EXPECT_EQ(std::filesystem::file_size(tokens), 40u + 2 * 1001);
  { std::fstream(tokens, std::ios::in | std::ios::out | std::ios::binary).seekp(40).write("\xff\xff", 2); }
  EXPECT_EQ(data::Examples(o, bytes()).training(0).ids, trained);
  // Another token of the vocabulary is found by the hash.
  { std::fstream(tokens, std::ios::in | std::ios::out | std::ios::binary).seekp(40 + 2 * 801).write("!", 1); }
  EXPECT_EQ(data::Examples(o, bytes()).heldout(0).ids, held);
}

TEST_F(ExamplesTest, ThreadsMayMakeOneFileOfTokensAtOnce) {
  std::string text;
  for (int i = 0; i < 200000; ++i) text += i % 50 == 49 ? '\n' : static_cast<char>('a' + i * i % 26);
  data::ExampleOptions o;
  o.files = {file("a.txt", text)};
  o.sequence = 100;
  const auto expected = data::Examples(o, bytes()).training(5).ids;
  o.cache = folder_.text();
  constexpr int kThreads = 8;
  std::vector<std::string> errors(kThreads);
  {
    std::barrier<> begin(kThreads);
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i)
      threads.emplace_back([&, i] {
        begin.arrive_and_wait();
        errors[static_cast<std::size_t>(i)] =
            error_of([&] { EXPECT_EQ(data::Examples(o, bytes()).training(5).ids, expected); });
      });
  }
  EXPECT_EQ(errors, std::vector<std::string>(kThreads));
  int found = 0;  // and nothing unfinished
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
    found += entry.path().filename().string().starts_with("tokens-");
  EXPECT_EQ(found, 1);
}

// Another user of a folder that all can write to puts tokens of another text under the name, with a right hash.
TEST_F(ExamplesTest, TokensThatOthersCanWriteAreMadeAgain) {
  const auto cache = folder_.path() / "cache";
  std::filesystem::create_directory(cache);
  std::filesystem::permissions(cache, std::filesystem::perms(01777));
  const auto made = [&](char letter) {
    data::ExampleOptions o;
    o.files = {file(std::string(1, letter), std::string(2000, letter))};
    o.sequence = 10;
    o.cache = cache.string();
    return data::Examples(o, bytes()).training(0).ids[0];
  };
  const auto tokens = [&] {
    std::filesystem::path newest;
    for (const auto& entry : std::filesystem::directory_iterator(cache))
      if (entry.path().filename().string().starts_with("tokens-")) newest = entry.path();
    return newest;
  };
  const mode_t before = ::umask(0);
  EXPECT_EQ(made('b'), 'b');
  std::string forged = file_text(tokens());
  std::filesystem::remove(tokens());
  EXPECT_EQ(made('a'), 'a');
  ::umask(before);
  const auto path = tokens();
  EXPECT_EQ(std::filesystem::status(path).permissions(), std::filesystem::perms(0644)) << "its owner alone writes it";
  forged.replace(8, 8, file_text(path), 8, 8);  // the key
  const auto put = [&](unsigned mode, uid_t owner) {
    std::filesystem::remove(path);
    std::ofstream(path, std::ios::binary) << forged;
    std::filesystem::permissions(path, std::filesystem::perms(mode));
    return owner == ::geteuid() || ::chown(path.c_str(), owner, owner) == 0;
  };
  ASSERT_TRUE(put(0644, ::geteuid()));
  EXPECT_EQ(made('a'), 'b') << "neither the key nor the hash shows it";
  for (const unsigned mode : {0646u, 0664u}) {
    ASSERT_TRUE(put(mode, ::geteuid()));
    EXPECT_EQ(made('a'), 'a') << std::oct << mode;
  }
  std::filesystem::remove(path);
  std::filesystem::create_symlink(file("elsewhere", forged), path);
  EXPECT_EQ(made('a'), 'a') << "a link";
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to make a file of another user";
  ASSERT_TRUE(put(0644, 65534));
  EXPECT_EQ(made('a'), 'a');
  ASSERT_EQ(::chown(cache.c_str(), 65534, 65534), 0);
  ASSERT_TRUE(put(0644, 65534));
  EXPECT_EQ(made('a'), 'b') << "the folder's owner could put anything there";
}

// Who makes the file holds the lock; another one waits for it, and reads.
TEST_F(ExamplesTest, OneMakesTheFileOfTokensForAll) {
  data::ExampleOptions o;
  o.files = {file("a.txt", std::string(2000, 'a'))};
  o.sequence = 10;
  o.cache = folder_.text();
  const int lock = ::open((folder_.path() / "tokens.lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  ASSERT_EQ(::flock(lock, LOCK_EX), 0);
  std::atomic<bool> done = false;
  std::jthread other([&] {
    EXPECT_EQ(data::Examples(o, bytes()).training(0).ids[0], 'a');
    done = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_FALSE(done);
  ::close(lock);
  other.join();
  EXPECT_TRUE(done);
}

TEST_F(ExamplesTest, OnlyTheCompletionHasALoss) {
  data::ExampleOptions o;
  o.task = Task::Prompt;
  o.files = {file("a.jsonl", R"({"prompt": "2+2=", "completion": "4"})")};
  o.sequence = 8;
  o.holdout = 0;
  const data::Examples examples(o, bytes());
  auto sample = examples.training(0);
  EXPECT_EQ(sample.ids, (std::vector<std::int32_t>{'2', '+', '2', '=', '4', 256, 256, 256}));
  EXPECT_EQ(sample.labels,
            (std::vector<std::int32_t>{kIgnored, kIgnored, kIgnored, '4', 256, kIgnored, kIgnored, kIgnored}));
  EXPECT_EQ(sample.mask, (std::vector<std::uint8_t>{1, 1, 1, 1, 1, 0, 0, 0}));
  // A long prompt loses its beginning, a long completion its end.
  o.files = {file("b.jsonl", R"({"prompt": "abcdefghijkl", "completion": "xyz"})")};
  sample = data::Examples(o, bytes()).training(0);
  EXPECT_EQ(sample.ids, codes("hijklxyz"));
  EXPECT_EQ(sample.labels[7], 256);
  o.files = {file("c.jsonl", R"({"prompt": "ab", "completion": "0123456789"})")};
  sample = data::Examples(o, bytes()).training(0);
  EXPECT_EQ(sample.ids, codes("b0123456"));
  EXPECT_EQ(sample.labels[0], '0');
  EXPECT_EQ(sample.labels[7], 256);
}

TEST_F(ExamplesTest, PromptAndCompletionAreTokenisedAsOneText) {
  const auto tokenizer = llama();
  const auto pieces_of = [&](const std::string& record, std::int64_t sequence = 12) {
    const data::ExampleOptions o{
        .task = Task::Prompt, .files = {file("a.jsonl", record)}, .sequence = sequence, .holdout = 0};
    const auto sample = data::Examples(o, tokenizer).training(0);
    // What has a loss is in brackets.
    std::string text;
    for (std::size_t i = 0; i < sample.ids.size() && sample.mask[i] != 0; ++i)
      text += (i == 0 ? "" : " ") + tokenizer->token_of(sample.ids[i]);
    text += " [";
    for (const auto label : sample.labels)
      if (label != kIgnored) text += (text.ends_with("[") ? "" : " ") + tokenizer->token_of(label);
    return text + "]";
  };
  EXPECT_EQ(pieces_of(R"({"prompt": "a", "completion": " b"})"), "<s> ▁a ▁b [▁b </s>]");
  EXPECT_EQ(pieces_of(R"({"prompt": "a", "completion": "c"})"), "<s> ▁a c [c </s>]");
  EXPECT_EQ(pieces_of(R"({"prompt": "a\n", "completion": "b a"})"), "<s> ▁a \n b ▁a [b ▁a </s>]");
  // The end of the prompt and the beginning of the completion are one token: each is tokenised by itself.
  EXPECT_EQ(pieces_of(R"({"prompt": "a ", "completion": "b"})"), "<s> ▁a ▁ ▁b [▁b </s>]");
  EXPECT_EQ(pieces_of(R"({"prompt": "", "completion": "b"})"), "<s> ▁b [▁b </s>]");
  EXPECT_EQ(pieces_of(R"({"prompt": "a", "completion": ""})"), "<s> ▁a [</s>]");
  // A prompt of which only the end is left still decides.
  EXPECT_EQ(pieces_of(R"({"prompt": "a a b a", "completion": " b b"})", 4), "<s> ▁a ▁b ▁b [▁b ▁b </s>]");
  EXPECT_EQ(pieces_of(R"({"prompt": "a", "completion": " b b b b b b"})", 3), "<s> ▁b ▁b [▁b ▁b </s>]");
  EXPECT_EQ(pieces_of(R"({"question": "a", "answers": ["b"]})", 64),
            "<s> ▁ Q u e s t i o n : ▁a \n \n A n s w e r : ▁b [▁b </s>]");
  EXPECT_EQ(pieces_of(R"({"context": "b", "question": "a", "answers": ["b"]})", 64),
            "<s> ▁b ▁ \n \n Q u e s t i o n : ▁a \n \n A n s w e r : ▁b [▁b </s>]");
  EXPECT_EQ(pieces_of(R"({"question": "a", "answers": []})", 64),
            "<s> ▁ Q u e s t i o n : ▁a \n \n A n s w e r : [</s>]");
}

TEST_F(ExamplesTest, QuestionsArePromptsForDecoders) {
  data::ExampleOptions o;
  o.task = Task::Prompt;
  o.answer_tokens = 8;
  o.files = {file("a.jsonl", R"({"context": "Ann is 3.", "question": "Age?", "answers": ["3", "three"]}
{"question": "Why?", "answers": []})")};
  o.sequence = 64;
  o.holdout = 0.5;
  const data::Examples examples(o, bytes());
  ASSERT_EQ(examples.heldout_records(), 1);
  const auto held = examples.heldout_record(0);
  const bool first = held.find("context") != nullptr;
  EXPECT_EQ(examples.references(0), first ? (std::vector<std::string>{"3", "three"}) : std::vector<std::string>{""});
  EXPECT_EQ(examples.heldout_prompt(0),
            codes(first ? "Ann is 3.\n\nQuestion: Age?\n\nAnswer:" : "Question: Why?\n\nAnswer:"));
  o.sequence = 40;  // the end of the context is cut, not the question
  o.holdout = 0;
  o.files = {file("b.jsonl", R"({"context": "Ann is 3 and lives in Paris.", "question": "Age?", "answers": ["3"]})")};
  const auto sample = data::Examples(o, bytes()).training(0);
  EXPECT_EQ(sample.ids, codes("Ann is 3 and \n\nQuestion: Age?\n\nAnswer: 3"));
  EXPECT_EQ(error_of([&] {
              data::Examples({.task = Task::Prompt, .files = {file("c.jsonl", R"({"text": "x"})")}, .holdout = 0},
                             bytes());
            }).find("[records] 1 fault\n"),
            0u);
  // All faults in one error, the first 20 in words.
  std::string many;
  for (int i = 0; i < 25; ++i) many += "{\"text\": \"x\"}\n";
  const auto all = error_of(
      [&] { data::Examples({.task = Task::Prompt, .files = {file("d.jsonl", many)}, .holdout = 0}, bytes()); });
  EXPECT_EQ(all.find("[records] 25 faults\n"), 0u);
  EXPECT_NE(all.find("d.jsonl:20: got a record without them, expected \"prompt\" and"), std::string::npos);
  EXPECT_EQ(all.find("d.jsonl:21"), std::string::npos);
  EXPECT_NE(all.find("and 5 more"), std::string::npos);
}

TEST_F(ExamplesTest, AHeldOutPromptDoesNotTellHowLongItsReferenceIs) {
  // Two records that differ in the reference alone, as prompts and as questions whose context is too long.
  const std::string context(90, 'c'), prompt(90, 'p');
  data::ExampleOptions o;
  o.task = Task::Prompt;
  o.files = {file("a.jsonl", R"({"prompt": "x", "completion": "y"})")};
  o.heldout_files = {file("b.jsonl", "{\"prompt\": \"" + prompt + "\", \"completion\": \"1\"}\n" + "{\"prompt\": \"" +
                                         prompt + "\", \"completion\": \"" + std::string(70, '2') + "\"}\n" +
                                         "{\"context\": \"" + context +
                                         "\", \"question\": \"Q?\", \"answers\": [\"c\"]}\n" + "{\"context\": \"" +
                                         context + "\", \"question\": \"Q?\", \"answers\": [\"" + std::string(60, 'c') +
                                         "\"]}\n" + "{\"prompt\": \"short\", \"completion\": \"1\"}\n")};
  o.sequence = 64;
  o.answer_tokens = 10;
  const data::Examples examples(o, bytes());
  EXPECT_EQ(examples.heldout_prompt(0), codes(std::string(54, 'p')));
  EXPECT_EQ(examples.heldout_prompt(1), examples.heldout_prompt(0));
  EXPECT_EQ(examples.heldout_prompt(2), codes(std::string(31, 'c') + "\n\nQuestion: Q?\n\nAnswer:"));
  EXPECT_EQ(examples.heldout_prompt(3), examples.heldout_prompt(2));
  EXPECT_EQ(examples.heldout_prompt(4), codes("short"));
  o.answer_tokens = 64;
  EXPECT_EQ(error_of([&] {
              data::Examples(o, bytes());
            }).find("[Examples] sequence: got 64, expected at least 65: a prompt and answer_tokens (64). Hint: "),
            0u);
  o.answer_tokens = 0;
  EXPECT_EQ(error_of([&] { data::Examples(o, bytes()); }),
            "[Examples] answer_tokens: got 0, expected 1 to 2^24 tokens");
}

TEST_F(ExamplesTest, ARecordWithoutAnyTokenIsRefused) {
  const auto refused = [&](const std::string& line) {
    return error_of([&] {
      data::Examples({.task = Task::Prompt,
                      .files = {file("a.jsonl", "{\"prompt\":\"x\",\"completion\":\"y\"}\n" + line)},
                      .sequence = 8,
                      .holdout = 0},
                     bytes());
    });
  };
  EXPECT_NE(
      refused(R"({"prompt": "", "completion": ""})").find("a.jsonl:2: got a prompt and a completion without a token"),
      std::string::npos);
  // One of them is enough, and labels are as long as the sequence.
  for (const char* const line : {R"({"prompt": "", "completion": "y"})", R"({"prompt": "x", "completion": ""})"}) {
    EXPECT_EQ(refused(line), "");
    const data::Examples examples({.task = Task::Prompt, .files = {file("b.jsonl", line)}, .sequence = 8, .holdout = 0},
                                  bytes());
    EXPECT_EQ(examples.training(0).labels.size(), 8u);
    EXPECT_EQ(examples.training(0).ids.size(), 8u);
  }
}

TEST_F(ExamplesTest, TargetsHaveAnEnd) {
  data::ExampleOptions o;
  o.task = Task::Seq2Seq;
  o.files = {file("a.csv", "source,target\nab,cd\n")};
  o.sequence = o.target_sequence = 6;
  o.holdout = 0;
  const data::Examples whole(o, bytes());
  EXPECT_EQ(whole.training(0).labels, (std::vector<std::int32_t>{'c', 'd', 256, kIgnored, kIgnored, kIgnored}));
  EXPECT_EQ(whole.training(0).decoder_ids, (std::vector<std::int32_t>{256, 'c', 'd', 256, 256, 256}));
  o.target_sequence = 2;  // a target that is cut has one too
  EXPECT_EQ(data::Examples(o, bytes()).training(0).labels, (std::vector<std::int32_t>{'c', 256}));
  o.target_sequence = 1;
  EXPECT_NE(error_of([&] { data::Examples(o, bytes()); }).find("[Examples] sequence: "), std::string::npos);
  // A tokenizer that adds an end gets no second one.
  o.target_sequence = 6;
  o.files = {file("b.csv", "source,target\nann,bob\n")};
  EXPECT_EQ(data::Examples(o, bert()).training(0).labels,
            (std::vector<std::int32_t>{id("[CLS]"), id("bob"), id("[SEP]"), kIgnored, kIgnored, kIgnored}));
}

TEST_F(ExamplesTest, MaskedTokensAreDrawnBySampleNumber) {
  std::string text;
  for (int i = 0; i < 4000; ++i) text += "ann lives in paris and bob lives in rome . ";
  data::ExampleOptions o;
  o.task = Task::Mlm;
  o.files = {file("a.txt", text)};
  o.sequence = 130;
  o.holdout = 0;
  const data::Examples examples(o, bert());
  double tokens = 0, chosen = 0, masked = 0, same = 0;
  for (int i = 0; i < 200; ++i) {
    const auto sample = examples.training(i);
    ASSERT_EQ(sample.ids.size(), 130u);
    EXPECT_EQ(sample.ids.front(), id("[CLS]"));
    EXPECT_EQ(sample.ids.back(), id("[SEP]"));
    EXPECT_EQ(sample.labels.front(), kIgnored);
    for (std::size_t j = 1; j + 1 < sample.ids.size(); ++j) {
      ++tokens;
      if (sample.labels[j] == kIgnored) continue;
      EXPECT_GE(sample.labels[j], id("ann"));
      EXPECT_TRUE(sample.ids[j] == id("[MASK]") || sample.ids[j] >= id("ann"));
      ++chosen;
      masked += sample.ids[j] == id("[MASK]");
      same += sample.ids[j] == sample.labels[j];
    }
  }
  EXPECT_NEAR(chosen / tokens, 0.15, 0.01);
  EXPECT_NEAR(masked / chosen, 0.8, 0.02);
  EXPECT_NEAR(same / chosen, 0.1 + 0.1 / 15, 0.015);
  EXPECT_EQ(examples.training(7).ids, data::Examples(o, bert()).training(7).ids);
  const auto epoch = examples.training_samples();
  std::map<std::vector<std::int32_t>, int> masks;  // the same text in another epoch has other masks
  for (std::int64_t i = 0; i < 2 * epoch && i < 4000; ++i) ++masks[examples.training(i).labels];
  EXPECT_GT(masks.size(), static_cast<std::size_t>(epoch));
}

TEST_F(ExamplesTest, DecodersBeginWithPadding) {
  data::ExampleOptions o;
  o.task = Task::Seq2Seq;
  o.files = {file("a.csv", "source,target\nann lives,bob\n")};
  o.sequence = 6;
  o.target_sequence = 4;
  o.holdout = 0;
  const auto sample = data::Examples(o, bert()).training(0);
  EXPECT_EQ(sample.ids, ids({"[CLS]", "ann", "lives", "[SEP]", "[PAD]", "[PAD]"}));
  EXPECT_EQ(sample.mask, (std::vector<std::uint8_t>{1, 1, 1, 1, 0, 0}));
  EXPECT_EQ(sample.decoder_ids, ids({"[PAD]", "[CLS]", "bob", "[SEP]"}));
  EXPECT_EQ(sample.labels, (std::vector<std::int32_t>{id("[CLS]"), id("bob"), id("[SEP]"), kIgnored}));
  o.decoder_start = id("[MASK]");
  o.target_sequence = 3;
  const auto other = data::Examples(o, bert()).training(0);
  EXPECT_EQ(other.decoder_ids, ids({"[MASK]", "[CLS]", "bob"}));
}

TEST_F(ExamplesTest, LabelsAreNumberedInOrder) {
  data::ExampleOptions o;
  o.task = Task::Classify;
  o.files = {
      file("a.jsonl",
           "{\"text\":\"ann\",\"label\":10}\n{\"text\":\"bob\",\"text_pair\":\"lives in rome in paris\",\"label\":9}")};
  o.sequence = 8;
  o.holdout = 0;
  const data::Examples examples(o, bert());
  EXPECT_EQ(examples.labels(), (std::vector<std::string>{"9", "10"}));
  for (int i = 0; i < 2; ++i) {
    const auto sample = examples.training(i);
    if (sample.label == 1) {
      EXPECT_EQ(sample.ids, ids({"[CLS]", "ann", "[SEP]", "[PAD]", "[PAD]", "[PAD]", "[PAD]", "[PAD]"}));
    } else {
      EXPECT_EQ(sample.label, 0);
      EXPECT_EQ(sample.ids, ids({"[CLS]", "bob", "[SEP]", "lives", "in", "rome", "in", "[SEP]"}));
      EXPECT_EQ(sample.types, (std::vector<std::int32_t>{0, 0, 0, 1, 1, 1, 1, 1}));
    }
  }
  o.labels = {"10", "x"};
  EXPECT_NE(error_of([&] { data::Examples(o, bert()); }).find("got the label \"9\""), std::string::npos);
  o.labels = {"x"};
  EXPECT_EQ(error_of([&] { data::Examples(o, bert()); }).find("[records] 2 faults\n"), 0u);
}

TEST_F(ExamplesTest, AnswersOfWindowsComeBackAsText) {
  const std::string context = "Ann lives in Paris. Bob lives in Rome, and Ann and Bob and Ann lives in Paris.";
  const auto start = context.find("Rome");
  data::ExampleOptions o;
  o.task = Task::Qa;
  o.files = {
      file("a.json",
           "{\"data\": [{\"paragraphs\": [{\"context\": \"" + context +
               "\", \"qas\": [{\"question\": \"Where lives Bob?\", \"id\": \"1\", \"answers\": [{\"text\": \"Rome\", "
               "\"answer_start\": " +
               std::to_string(start) + "}]}]}]}]}")};
  o.heldout_files = o.files;
  o.sequence = 16;
  o.stride = 3;
  const data::Examples examples(o, bert());
  EXPECT_GT(examples.heldout_samples(), 1);
  data::QaAnswers answers(examples, false);
  int with_answer = 0;
  for (std::int64_t i = 0; i < examples.heldout_samples(); ++i) {
    const auto sample = examples.heldout(i);
    ASSERT_EQ(sample.ids.size(), 16u);
    EXPECT_EQ(std::vector<std::int32_t>(sample.ids.begin(), sample.ids.begin() + 6),
              ids({"[CLS]", "where", "lives", "bob", "?", "[SEP]"}));
    EXPECT_EQ(sample.types[6], 1);
    std::vector<float> first(16, 0), last(16, 0);
    if (sample.start > 0) {
      ++with_answer;
      EXPECT_EQ(sample.ids[static_cast<std::size_t>(sample.start)], id("rome"));
      first[static_cast<std::size_t>(sample.start)] = last[static_cast<std::size_t>(sample.end)] = 5;
    } else {
      EXPECT_EQ(std::count(sample.ids.begin(), sample.ids.end(), id("rome")), 0);
    }
    answers.add(sample, first, last);
  }
  EXPECT_GE(with_answer, 1);
  EXPECT_EQ(answers.texts(), std::vector<std::string>{"Rome"});
  EXPECT_EQ(examples.references(0), std::vector<std::string>{"Rome"});
  EXPECT_THROW(answers.add(examples.heldout(0), std::vector<float>(3), std::vector<float>(3)), std::invalid_argument);
}

TEST_F(ExamplesTest, AbstainingNeedsAHigherScoreInEveryWindow) {
  data::ExampleOptions o;
  o.task = Task::Qa;
  o.files = {file("a.jsonl", R"({"context": "Ann lives in Paris", "question": "Who?", "answers": []}
{"context": "Ann lives in Paris", "question": "Where?", "answers": ["Paris"]})")};
  o.heldout_files = o.files;
  o.sequence = 32;
  const data::Examples examples(o, bert());
  ASSERT_EQ(examples.heldout_samples(), 2);
  for (const bool abstain : {false, true}) {
    data::QaAnswers answers(examples, abstain);
    for (int i = 0; i < 2; ++i) {
      const auto sample = examples.heldout(i);
      std::vector<float> first(32, -1), last(32, -1);
      first[0] = last[0] = 2;
      first[4] = 3;  // [CLS] who ? [SEP] ann
      last[7] = i == 0 ? 0.5F : 1.5F;
      last[3] = last[2] = 9;  // no token of the context
      answers.add(sample, first, last);
    }
    EXPECT_EQ(answers.texts(), (std::vector<std::string>{abstain ? "" : "Ann lives in Paris", "Ann lives in Paris"}));
  }
}

TEST_F(ExamplesTest, ReadersResumeExactlyWithAnyNumberOfRanks) {
  std::string lines;
  for (int i = 0; i < 40; ++i) lines += "{\"prompt\": \"" + std::to_string(i) + "\", \"completion\": \"x\"}\n";
  data::ExampleOptions o;
  o.task = Task::Prompt;
  o.answer_tokens = 4;
  o.files = {file("a.jsonl", lines)};
  o.sequence = 8;
  const data::Examples examples(o, bytes());
  EXPECT_EQ(examples.training_samples(), 36);
  std::vector<std::vector<std::int32_t>> whole;
  data::ExampleReader alone(examples, 0, 1);
  for (const auto& sample : alone.next(24)) whole.push_back(sample.ids);
  data::ExampleReader first(examples, 0, 2), second(examples, 1, 2);
  std::vector<std::vector<std::int32_t>> parts;
  for (auto* reader : {&first, &second})
    for (const auto& sample : reader->next(6)) parts.push_back(sample.ids);
  data::ExampleReader resumed(examples, 0, 1);
  resumed.restore(second.state());
  EXPECT_EQ(resumed.position(), 12);
  for (const auto& sample : resumed.next(12)) parts.push_back(sample.ids);
  EXPECT_EQ(parts, whole);
  std::set<std::int64_t> records;
  for (int i = 0; i < 36; ++i) records.insert(examples.training(i).record);
  EXPECT_EQ(records.size(), 36u);
  // Held-out records are not those of training.
  std::set<std::vector<std::int32_t>> trained;
  for (int i = 0; i < 36; ++i) trained.insert(examples.training(i).ids);
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(trained.contains(examples.heldout(i).ids));

  const auto refused = [&](data::ExampleOptions other) {
    const data::Examples changed(other, bytes());
    data::ExampleReader reader(changed, 0, 1);
    return error_of([&] { reader.restore(first.state()); });
  };
  auto other = o;
  other.seed = 2;
  EXPECT_NE(refused(other).find("[ExampleReader::restore] got seed 2, expected 1"), std::string::npos);
  other = o;
  other.files = {file("b.jsonl", lines.substr(0, lines.size() - 4) + "y\"}\n")};
  EXPECT_NE(refused(other).find("got digest"), std::string::npos);
  EXPECT_NE(error_of([&] { resumed.restore("{}"); }).find("the saved position"), std::string::npos);
  // Of a version that tokenised completions by themselves.
  auto older = second.state();
  const auto digest = std::to_string(examples.digest());
  older.replace(older.find(digest), digest.size(), "10485724208618620325");
  EXPECT_NE(error_of([&] { resumed.restore(older); }).find("got digest"), std::string::npos) << digest;
}

TEST_F(ExamplesTest, WhatDoesNotServeATaskIsRefused) {
  const auto text = file("a.txt", "abc");
  const auto refused = [&](data::ExampleOptions o, const std::shared_ptr<const data::Tokenizer>& tokenizer) {
    if (o.files.empty()) o.files = {text};
    return error_of([&] { data::Examples(o, tokenizer); });
  };
  EXPECT_NE(refused({}, bytes()).find("too little for one training sample"), std::string::npos);
  const auto two = file("two.txt", std::string(399, 'a'));
  EXPECT_NE(refused({.files = {two}}, bytes()).find("two.txt] got too little for one held-out sample of 128 tokens"),
            std::string::npos);
  EXPECT_NE(refused({.files = {two}, .heldout_files = {text}, .holdout = 0}, bytes())
                .find("a.txt] got too little for one held-out sample"),
            std::string::npos);
  EXPECT_EQ(refused({.files = {two}, .holdout = 0}, bytes()), "");
  EXPECT_NE(refused({.task = Task::Mlm}, bytes()).find("tokenizer without"), std::string::npos);
  EXPECT_NE(refused({.sequence = 1}, bytes()).find("sequence: got 1"), std::string::npos);
  EXPECT_NE(refused({.holdout = 1}, bytes()).find("holdout"), std::string::npos);
  EXPECT_NE(refused({.task = Task::Classify}, bert()).find("expected a field \"label\""), std::string::npos);
  const auto question = file("q.jsonl", R"({"context": "Ann", "question": "Who?", "answers": ["Bob", "Eve"]})");
  EXPECT_NE(refused({.task = Task::Qa, .files = {question}, .holdout = 0}, bert())
                .find("\"Eve\", which is not in the context"),
            std::string::npos);
  EXPECT_NE(refused({.task = Task::Qa, .files = {question}, .holdout = 0}, bytes()).find("tokenizer without"),
            std::string::npos);
  EXPECT_THROW((void)data::task_of("x"), std::invalid_argument);
  EXPECT_EQ(data::task_of("seq2seq"), Task::Seq2Seq);
}

}  // namespace
}  // namespace examples_test
