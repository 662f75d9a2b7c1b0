// `zero train --model`: the same bits at every stage and after a resume, adapters, and what is refused in words. The
// losses themselves, and files of and for transformers and PEFT, are compared in python/tests/test_finetuning.py.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/model_runs.h"
#include "support/folder.h"
#include "support/nightly.h"
#include "support/process.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::train_model_test {
namespace {

using namespace model_runs;

TEST(TrainModel, ALlamaIsTheSameAtEveryStage) {
  const auto folder = make_folder();
  const auto options = llama() + kOneMicroBatch;
  const auto first = train(folder, 2, options + Words{"--stage", "0", "--export", "stage0"}, 4);
  ASSERT_EQ(first.code, 0) << first.err;
  ASSERT_EQ(first.losses.size(), 4U);
  EXPECT_GT(first.result["metrics"]["perplexity"], 1);
  EXPECT_EQ(first.record["metrics"]["perplexity"], first.result["metrics"]["perplexity"]);
  EXPECT_NE(first.out.find("perplexity"), std::string::npos) << first.out;
  const auto weights = plain_folder(folder + "/stage0");
  OneIn part(2);
  for (const Words& more :
       {Words{"--stage", "3"}, Words{"--stage", "1"},
        Words{"--stage", "3", "--set", "zero_optimization.offload_optimizer.device=cpu"},
        Words{"--stage", "3", "--set", "activation_checkpointing.number_checkpoints=2"}, Words{"--stage", "2"}}) {
    if (!part.take()) continue;
    const auto name = "out-" + more.back();
    std::filesystem::remove_all(folder + "/" + name);
    const auto run = train(folder, 2, options + more + Words{"--export", name}, 4);
    expect_same(first, run, more.back());
    const auto same = plain_folder(folder + "/" + name);
    ASSERT_EQ(same.size(), weights.size());
    for (const auto& [key, tensor] : weights) EXPECT_EQ(same.at(key).floats(), tensor.floats()) << name << " " << key;
  }
}

TEST(TrainModel, BertAnswersAreTheSameAtEveryStage) {
  const auto folder = make_folder();
  const auto options = bert("qa", "squad.json") + kOneMicroBatch + Words{"--dtype", "bf16"};
  const auto first = train(folder, 2, options + Words{"--stage", "0"}, 4);
  ASSERT_EQ(first.code, 0) << first.err;
  for (const char* const name : {"f1", "exact_match"}) {
    ASSERT_TRUE(first.result["metrics"].contains(name)) << first.result.dump();
    EXPECT_GE(first.result["metrics"][name], 0);
    EXPECT_LE(first.result["metrics"][name], 100);
  }
  expect_same(first, train(folder, 2, options + Words{"--stage", "3"}, 4), "stage 3");
}

// Masks, dropout and the order of samples are those of the position.
TEST(TrainModel, AResumedRunIsTheUninterruptedOne) {
  const auto folder = make_folder();
  for (const Words& options : {bert("mlm", "text.txt") + Words{"--set", "libzero.model.dropout=0.1"},
                               llama() + Words{"--lora", "rank=2,dropout=0.1,targets=q_proj+v_proj", "--set",
                                               "activation_checkpointing.number_checkpoints=2"}}) {
    std::filesystem::remove_all(folder + "/out");
    std::filesystem::remove_all(folder + "/ck");
    const auto whole = train(folder, 2, options + Words{"--stage", "2"}, 6);
    ASSERT_EQ(whole.code, 0) << whole.err;
    std::filesystem::remove_all(folder + "/out");
    const Words kept = {"--stage", "2", "--checkpoint-dir", "ck", "--resume", "auto"};
    ASSERT_EQ(train(folder, 2, options + kept, 3).code, 0);
    const auto rest = train(folder, 2, options + kept, 6);
    expect_same(whole, rest, options[1]);
  }
}

// Generated answers and samples, too, where every forward gathers parameters.
TEST(TrainModel, EveryTaskHasItsMetric) {
  const auto folder = make_folder();
  std::string pairs;
  for (std::size_t i = 0; i < 20; ++i)
    pairs += json{{"source", kNames[i % 4] + " lives"}, {"target", kTowns[i % 4]}}.dump() + "\n";
  write(folder + "/pairs.jsonl", pairs);
  const auto t5 = [](const std::string& task, const std::string& data) {
    return Words{"--model", "t5-small", "--task", task, "--data", data} + kTiny;
  };
  const std::vector<std::pair<Words, std::string>> cases = {
      {bert("classify", "labels.jsonl"), "accuracy"},
      {t5("seq2seq", "pairs.jsonl"), "perplexity"},
      {t5("qa", "squad.json"), "f1"},
      {Words{"--model", "llama-110m", "--task", "qa", "--data", "squad.json"} + kTiny, "f1"},
      {Words{"--model", "gpt2", "--task", "lm", "--data", "prompts.jsonl", "--eval-data", "prompts.jsonl"} + kTiny,
       "perplexity"}};
  for (const auto& [words, metric] : cases) {
    std::filesystem::remove_all(folder + "/out");
    const auto run = train(folder, 2, words + Words{"--stage", "3", "--set", "libzero.data.eval_batches=2"}, 2);
    ASSERT_EQ(run.code, 0) << words[1] << " " << words[3] << "\n" << run.err;
    ASSERT_TRUE(run.result["metrics"].contains(metric)) << words[1] << " " << words[3] << run.result["metrics"];
    EXPECT_GE(run.result["metrics"][metric], 0);
    EXPECT_GT(run.result["heldout_samples"], 0);
    if (words[1] != "bert-base") EXPECT_NE(run.out.find("sample, after the"), std::string::npos) << run.out;
  }
}

// Five questions that a small model learns by heart. The file for evaluation has another answer to the second one, and
// of the fourth's the last word alone, so that the scores are known. Another has each question twice, the second time
// with a longer context.
void write_known(const std::string& folder) {
  const Words names = {"anna", "ben", "dorothea", "frederic", "gus"};
  const Words towns = {"oslo", "rome", "lima", "new york", "quito"}, others = {"oslo", "lima", "lima", "york", "quito"};
  write(folder + "/words/vocab.txt",
        "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n.\n?\nwhere\ndoes\nlive\nlives\nin\nanna\nben\ndorothea\nfrederic\ngus\n"
        "oslo\nrome\nlima\nnew\nyork\nquito\n");
  std::string questions, asked, uneven, labels, labelled;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::size_t k = (i + 1) % names.size();
    const auto record = [&](const std::string& answer, int points) {
      std::string context = names[i] + " lives in " + towns[i] + ". " + names[k] + " lives in " + towns[k] + ".";
      while (points-- > 0) context += " .";
      return json{{"context", context},
                  {"question", "where does " + names[i] + " live?"},
                  {"answers", json::array({answer})}}
                 .dump() +
             "\n";
    };
    questions += record(towns[i], 0);
    asked += record(others[i], 0);
    for (const int points : {0, 50}) uneven += record(towns[i], points);
    const auto labelled_as = [&](bool yes) {
      return json{{"text", names[i] + " lives in " + towns[i] + "."}, {"label", yes ? "yes" : "no"}}.dump() + "\n";
    };
    labels += labelled_as(i % 2 == 0);
    labelled += labelled_as(i % 2 == 0 || i == 1);
  }
  write(folder + "/questions.jsonl", questions);
  write(folder + "/asked.jsonl", asked);
  write(folder + "/uneven.jsonl", uneven);
  write(folder + "/labels.jsonl", labels);
  write(folder + "/labelled.jsonl", labelled);
}

// Two ranks with micro-batches of 2: in the second round, one rank has one sample and the other none. Then one rank
// with all five in one micro-batch.
TEST(TrainModel, ScoresAreThoseOfKnownAnswers) {
  const auto folder = make_folder();
  write_known(folder);
  const json f1{{"exact_match", 100 * 3 / 5.0}, {"f1", 100 * (3 + 2 / 3.0) / 5}};
  struct Case {
    std::string model, length, rate;
    int steps;
    Words words, more;
    json metrics;
  };
  const Words asked = {"--task", "qa", "--data", "questions.jsonl", "--eval-data", "asked.jsonl"};
  const Words words = {"--tokenizer", "words", "--set", "libzero.model.dropout=0"};
  const Words bytes = {"--tokenizer", "bytes", "--set", "libzero.model.dropout=0"};
  const std::vector<Case> cases = {
      {"bert-base", "32", "0.01", 150, asked, words, f1},
      {"bert-base", "32", "0.01", 150,
       Words{"--task", "classify", "--data", "labels.jsonl", "--eval-data", "labelled.jsonl"}, words,
       json{{"accuracy", 4 / 5.0}}},
      {"t5-small", "128", "0.003", 250, asked, bytes, f1},
      {"llama-110m", "144", "0.01", 150, asked, bytes, f1}};
  OneIn part(2);
  for (const auto& [model, length, rate, steps, data, more, metrics] : cases) {
    if (!part.take()) continue;
    for (const char* const name : {"/out", "/learned"}) std::filesystem::remove_all(folder + name);
    const Words one = {"--set", "gradient_accumulation_steps=1"};
    const auto run = train(folder, 2,
                           Words{"--model", model, "--seq-length", length} + data + more + kSmall + one +
                               Words{"--lr", rate, "--export", "learned"},
                           steps);
    ASSERT_EQ(run.code, 0) << model << "\n" << run.err;
    EXPECT_EQ(run.result["heldout_samples"], 5);
    for (const auto& [name, value] : metrics.items())
      EXPECT_NEAR(run.result["metrics"][name].get<double>(), value.get<double>(), 1e-6) << model << " " << name;
    const auto again = train(
        folder, 1,
        Words{"--model", "learned", "--seq-length", length, "--lr", "0", "--set", "train_micro_batch_size_per_gpu=8"} +
            data + more + one,
        1);
    ASSERT_EQ(again.code, 0) << model << "\n" << again.err;
    const double loss = run.result["heldout_loss"];
    // BERT chooses an answer's tokens among padding, too, as in transformers: their loss is that of a micro-batch.
    if (model != "bert-base" || data[1] != "qa")
      EXPECT_NEAR(again.result["heldout_loss"].get<double>(), loss, 1e-5 * loss) << model;
    EXPECT_EQ(again.result["metrics"], run.result["metrics"]) << model;
  }
}

// What a model says that has hardly learned changes with all that it reads; a question that is alone has no padding.
TEST(TrainModel, AnswersDoNotDependOnPadding) {
  const auto folder = make_folder();
  write_known(folder);
  const Words data = {"--task",       "qa",          "--data",       "questions.jsonl", "--eval-data",
                      "uneven.jsonl", "--tokenizer", "bytes",        "--set",           "libzero.model.dropout=0",
                      "--seq-length", "288",         "--predictions"};
  for (const char* const model : {"llama-110m", "t5-small"}) {
    for (const char* const name : {"/out", "/begun"}) std::filesystem::remove_all(folder + name);
    const auto run =
        train(folder, 2,
              Words{"--model", model, "--lr", "0.01", "--export", "begun"} + data + Words{"padded.json"} + kSmall, 20);
    ASSERT_EQ(run.code, 0) << run.err;
    const auto alone =
        train(folder, 1,
              Words{"--model", "begun", "--set", "train_micro_batch_size_per_gpu=1"} + data + Words{"alone.json"}, 0);
    ASSERT_EQ(alone.code, 0) << alone.err;
    EXPECT_EQ(json::parse(std::ifstream(folder + "/padded.json")), json::parse(std::ifstream(folder + "/alone.json")));
  }
}

// Two prompts of 18 and 17 bytes with their completions, in samples of at most 32 tokens.
TEST(TrainModel, PaddingThatIsNotComputedIsNotCounted) {
  const auto folder = make_folder();
  const Words data = {"--data", "prompts.jsonl", "--eval-data", "prompts.jsonl"};
  const auto run = train(folder, 1, Words{"--model", "llama-110m", "--task", "lm"} + data + kTiny, 2);
  ASSERT_EQ(run.code, 0) << run.err;
  std::ifstream log(folder + "/out/log.jsonl");
  std::string line;
  std::getline(log, line);
  const auto step = json::parse(line);
  EXPECT_NEAR(step["tokens_per_s"].get<double>() * step["step_ms"].get<double>() / 1000, 2 * 2 * 18, 0.01);
}

// An evaluation between steps is that of a run which ends there, and changes no step.
TEST(TrainModel, EvaluatesBetweenSteps) {
  const auto folder = make_folder();
  const auto options = bert("qa", "squad.json") + Words{"--set", "libzero.model.dropout=0.1", "--stage", "3"};
  const auto run = train(folder, 2, options + Words{"--eval-every", "2"}, 5);
  ASSERT_EQ(run.code, 0) << run.err;
  ASSERT_EQ(run.losses.size(), 5U);
  ASSERT_EQ(run.evaluations.size(), 3U);
  EXPECT_EQ(run.evaluations[1]["step"], 4);
  EXPECT_EQ(run.evaluations[2]["step"], 5);
  EXPECT_NEAR(run.evaluations[2]["heldout_loss"].get<double>(), run.result["heldout_loss"].get<double>(), 1e-8);
  EXPECT_NE(run.out.find("step 2/5 held-out "), std::string::npos) << run.out;
  EXPECT_EQ(run.out.find("step 5/5 held-out "), std::string::npos) << "the end says it\n" << run.out;
  const auto shorter = train(folder, 2, options, 4);
  ASSERT_EQ(shorter.code, 0) << shorter.err;
  EXPECT_EQ(std::vector<double>(run.losses.begin(), run.losses.begin() + 4), shorter.losses);
  EXPECT_TRUE(shorter.evaluations.empty());
  const auto& fourth = run.evaluations[1];
  EXPECT_NEAR(fourth["heldout_loss"].get<double>(), shorter.result["heldout_loss"].get<double>(), 1e-8);
  EXPECT_NEAR(fourth["metrics"]["f1"].get<double>(), shorter.result["metrics"]["f1"].get<double>(), 1e-6);
  EXPECT_NE(run.evaluations[0]["heldout_loss"], fourth["heldout_loss"]);
  // The recorded step is an ordinary one: without the evaluation's traffic, and with all gathers.
  EXPECT_EQ(run.record["recorded"]["traffic"], shorter.record["recorded"]["traffic"]);
  const auto third = train(folder, 2, options + Words{"--eval-every", "3"}, 5);
  EXPECT_EQ(third.record["recorded"]["traffic"], shorter.record["recorded"]["traffic"]);
}

// Completes the pending update, which is said; the loss is that of a run which ends there.
TEST(TrainModel, EvaluatesBetweenDelayedUpdates) {
  const auto folder = make_folder();
  const auto options = llama() + Words{"--stage", "2",
                                       "--set",   "zero_optimization.offload_optimizer.device=cpu",
                                       "--set",   "zero_optimization.delayed_update.enabled=true",
                                       "--set",   "zero_optimization.delayed_update.start_step=1"};
  const auto run = train(folder, 2, options + Words{"--eval-every", "3"}, 4);
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_NE(run.err.find("--eval-every completes the delayed update"), std::string::npos) << run.err;
  const auto shorter = train(folder, 2, options, 3);
  ASSERT_EQ(shorter.code, 0) << shorter.err;
  EXPECT_EQ(shorter.err.find("--eval-every"), std::string::npos) << shorter.err;
  ASSERT_EQ(run.evaluations.size(), 2U);
  EXPECT_NEAR(run.evaluations[0]["heldout_loss"].get<double>(), shorter.result["heldout_loss"].get<double>(), 1e-8);
}

// Weights that a run has written, without a step: its held-out loss, its text and its files again.
TEST(TrainModel, EvaluatesAndWritesWithoutAStep) {
  const auto folder = make_folder();
  const auto trained = train(folder, 2, llama() + Words{"--export", "trained", "--prompt", "anna lives"}, 3);
  ASSERT_EQ(trained.code, 0) << trained.err;
  std::filesystem::remove_all(folder + "/out");
  const Words again = {"--model",  "trained",    "--tokenizer",  "bytes", "--task",   "lm",
                       "--data",   "text.txt",   "--seq-length", "32",    "--export", "again",
                       "--prompt", "anna lives", "--stage",      "3"};
  const auto run = train(folder, 2, again + Words{"--prompt", "ben"}, 0);
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_TRUE(run.losses.empty());
  EXPECT_TRUE(run.result["final_loss"].is_null());
  EXPECT_EQ(run.result["heldout_loss"], trained.result["heldout_loss"]);
  ASSERT_EQ(run.result["samples"].size(), 2U) << run.result;
  EXPECT_EQ(run.result["samples"][0], trained.result["samples"][0]);
  EXPECT_EQ(run.result["samples"][0]["prompt"], "anna lives");
  EXPECT_EQ(run.result["samples"][1]["prompt"], "ben");
  const auto first = plain_folder(folder + "/trained"), second = plain_folder(folder + "/again");
  ASSERT_EQ(first.size(), second.size());
  for (const auto& [name, tensor] : first) EXPECT_EQ(second.at(name).floats(), tensor.floats()) << name;
}

// Held-out records alone, and what is said of a folder without weights and of a tokenizer that ends texts otherwise.
TEST(TrainModel, EvaluatesWhatItIsGiven) {
  const auto folder = make_folder();
  ASSERT_EQ(train(folder, 1, llama() + Words{"--export", "trained"}, 1).code, 0);
  const Words model = {"--model", "trained", "--task", "lm", "--eval-data", "text.txt", "--seq-length", "32"};
  const auto whole = train(folder, 1, model + Words{"--tokenizer", "bytes"}, 0);
  ASSERT_EQ(whole.code, 0) << whole.err;
  // 60 lines of 2 * (4 or 3 + 15) + 1 bytes or so, each with its end, in samples of 32.
  std::ifstream text(folder + "/text.txt", std::ios::ate);
  EXPECT_EQ(whole.result["heldout_samples"], (static_cast<std::int64_t>(text.tellg()) - 1) / 32);
  EXPECT_EQ(whole.err.find("has no weights"), std::string::npos) << whole.err;
  std::filesystem::remove(folder + "/trained/model.safetensors");
  const auto other = train(folder, 1, model + Words{"--tokenizer", "words"}, 0);
  ASSERT_EQ(other.code, 0) << other.err;
  EXPECT_NE(other.err.find("warning: trained has no weights (model.safetensors"), std::string::npos) << other.err;
  EXPECT_NE(other.err.find("end with the tokenizer's token 3, but trained/config.json has eos_token_id 256"),
            std::string::npos)
      << other.err;
}

// The file of answers has every held-out question once, and what it says is what exact match counts: towns are one
// word, in lower case.
TEST(TrainModel, WritesItsAnswers) {
  const auto folder = make_folder();
  const json squad = json::parse(std::ifstream(folder + "/squad.json"));
  std::map<std::string, std::string> towns;
  for (const auto& paragraph : squad["data"][0]["paragraphs"])
    for (const auto& question : paragraph["qas"]) towns[question["id"]] = question["answers"][0]["text"];
  const Words held = {"--eval-data", "squad.json", "--predictions", "answers.json", "--stage", "3", "--lr", "5e-3"};
  for (const auto& words :
       {bert("qa", "squad.json"), Words{"--model", "llama-110m", "--task", "qa", "--data", "squad.json", "--tokenizer",
                                        "words", "--seq-length", "48"} +
                                      kSmall}) {
    const auto run = train(folder, 2, words + held, 40);
    ASSERT_EQ(run.code, 0) << run.err;
    const json answers = json::parse(std::ifstream(folder + "/answers.json"));
    EXPECT_EQ(answers.size(), towns.size());
    double right = 0;
    for (const auto& [id, text] : answers.items()) {
      ASSERT_TRUE(towns.contains(id)) << id;
      auto word = text.get<std::string>();
      while (!word.empty() && (word.back() == '.' || word.back() == ' ')) word.pop_back();
      right += word == towns[id] ? 1 : 0;
    }
    EXPECT_GT(right, 10) << words[1];
    EXPECT_NEAR(run.result["metrics"]["exact_match"].get<double>(), 100 * right / static_cast<double>(towns.size()),
                1e-6);
  }
}

// Ranks and runs share one file of tokens; a run with it is the run without.
TEST(TrainModel, SharesTokens) {
  const auto folder = make_folder();
  std::filesystem::create_directory(folder + "/tokens");
  const auto first = train(folder, 2, llama() + Words{"--token-cache", "tokens"}, 2);
  ASSERT_EQ(first.code, 0) << first.err;
  const auto made = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder + "/tokens"))
      if (const auto name = entry.path().filename().string(); name != "tokens.lock") names.push_back(name);
    return names;
  };
  const auto names = made();
  ASSERT_EQ(names.size(), 1U);
  const auto path = folder + "/tokens/" + names[0];
  const auto written = std::filesystem::last_write_time(path);
  const auto second = train(folder, 2, llama() + Words{"--token-cache", "tokens"}, 2);
  expect_same(first, second, "again");
  EXPECT_EQ(std::filesystem::last_write_time(path), written);
  EXPECT_EQ(made(), names);
  expect_same(first, train(folder, 2, llama(), 2), "without");
}

TEST(TrainModel, SaysWhatItCannotDo) {
  const auto folder = make_folder();
  write(folder + "/no-fields.jsonl", R"({"words": "anna"})"
                                     "\n");
  std::filesystem::create_directory(folder + "/other");
  write(folder + "/other/config.json", R"({"model_type": "mamba"})");
  std::filesystem::create_directory(folder + "/bare");
  write(folder + "/bare/config.json", R"({"model_type": "gpt2", "vocab_size": 300})");
  std::filesystem::copy(folder + "/squad.json", folder + "/twice.json");
  std::filesystem::create_directory(folder + "/pissa");
  write(folder + "/pissa/adapter_config.json", R"({"peft_type": "LORA", "r": 2, "lora_alpha": 2,
    "target_modules": ["q_proj"], "init_lora_weights": "pissa_niter_4",
    "kasa_config": {"k": 1}, "corda_config": null})");
  struct Case {
    Words words;
    std::string message;
    int steps = 1;
  };
  const std::vector<Case> cases = {
      {{"--task", "lm"}, "[--task] got no --model"},
      {{"--model", "llama-110m", "--data", "text.txt"}, "got no --task"},
      {{"--model", "llama-110m", "--task", "lm"}, "[--data] got none"},
      {llama() + Words{"--text", "text.txt"}, "[--text] got --model, too"},
      {{"--model", "llama-110m", "--task", "mlm", "--data", "text.txt"},
       "expected lm, qa. Hint: mlm is a task of bert"},
      {{"--model", "bert-base", "--task", "lm", "--data", "text.txt"}, "expected mlm, classify, qa"},
      {{"--model", "t5-small", "--task", "classify", "--data", "labels.jsonl"}, "expected seq2seq, qa"},
      {{"--model", "vit-base", "--task", "classify", "--data", "labels.jsonl"}, "for a model of the type vit"},
      {{"--model", "nobody", "--task", "lm", "--data", "text.txt"}, "got nobody, which is no folder here"},
      {{"--model", "meta/llama", "--task", "lm", "--data", "text.txt"}, "nothing is downloaded"},
      {{"--model", "other", "--task", "lm", "--data", "text.txt"}, "mamba"},
      {bert("qa", "text.txt"), "text.txt"},
      {bert("classify", "no-fields.jsonl"), "no-fields.jsonl:1"},
      {bert("mlm", "absent.txt"), "absent.txt"},
      {{"--model", "bert-base", "--task", "mlm", "--data", "text.txt", "--tokenizer", "absent"}, "absent"},
      {llama() + Words{"--set", "libzero.model.vocabulary=1000"}, "[libzero.model.vocabulary] got a value"},
      {llama() + Words{"--set", "libzero.model.tied=false"}, "[libzero.model.tied] got a value"},
      {llama() + Words{"--set", "libzero.model.size=gpt2"}, "[libzero.model.size] got a value"},
      {llama() + Words{"--set", "libzero.data.text=text.txt"}, "[libzero.data.text] got a value"},
      {{"--model", "bare", "--task", "lm", "--data", "text.txt"}, "Hint: --tokenizer DIR"},
      {{"--model", "text.txt", "--task", "lm", "--data", "text.txt"}, "[--model] got the file text.txt"},
      {{"--model", "", "--task", "lm", "--data", "text.txt"}, "[--model] got an empty text"},
      {llama() + Words{"--tokenizer", ""}, "[--tokenizer] got an empty text"},
      {llama() + Words{"--generate", ""}, "[--generate] got an empty text"},
      {llama() + Words{"--lora", ""}, "[--lora] got an empty text"},
      {llama() + Words{"--lora-from", ""}, "[--lora-from] got an empty text"},
      {llama() + Words{"--lora-from", "pissa"}, "kasa_config: got {\"k\":1}"},
      {llama() + Words{"--lora-from", "pissa"}, "init_lora_weights: got \"pissa_niter_4\""},
      {llama() + Words{"--lora", "rank=0"}, "[--lora] got rank \"0\""},
      {llama() + Words{"--lora", "rank=4", "--export", "adapters"}, "[--export] got adapters on the random weights"},
      {llama() + Words{"--lora", "rank=4,targets=q_proj+qproj"}, "without a linear layer: qproj,"},
      {llama() + Words{"--lora", "ranks=4"}, "[--lora] got \"ranks\""},
      {llama() + Words{"--lora", "rank=4,targets=query"}, "targets=query"},
      {llama() + Words{"--merge-lora"}, "[--merge-lora] got neither"},
      {llama() + Words{"--predictions", "answers.json"}, "[--predictions] got --task lm"},
      {llama() + Words{"--token-cache", "absent"}, "[--token-cache] got absent"},
      {bert("classify", "labels.jsonl") + Words{"--token-cache", "words"}, "[--token-cache] got records"},
      {bert("qa", "squad.json") + Words{"--predictions", "absent/a.json"}, "[--predictions] got absent/a.json"},
      {bert("qa", "squad.json") + Words{"--predictions", "words"}, "[--predictions] got words"},
      {bert("qa", "squad.json") + Words{"--predictions", "squad.json"}, "which is a file of --data"},
      {bert("qa", "squad.json") + Words{"--eval-data", "squad.json", "--eval-data", "twice.json", "--predictions", "a"},
       "[--predictions] got the id 0 twice"},
      {{"--model", "pissa", "--task", "lm", "--data", "text.txt"}, "[--model] got adapters"},
      {llama() + Words{"--eval-every", "2"}, "[--eval-every] got --steps 0", 0},
      {llama() + Words{"--checkpoint-dir", "ck"}, "[--checkpoint-dir] got --steps 0", 0},
      {llama() + Words{"--prompt", std::string(1100, 'x')}, "[--prompt] got 1100 tokens"},
      {llama() + Words{"--prompt", ""}, "[--prompt] got \"\" without a token"},
      {bert("mlm", "text.txt") + Words{"--prompt", "anna"}, "bert does not generate text"},
      {llama() + Words{"--lora", "rank=4", "--export", "adapters", "--init-from", "plain", "--resume", "auto",
                       "--checkpoint-dir", "ck", "--weights-only"},
       "[--export] got adapters on the weights of a checkpoint"},
      {llama() + Words{"--lora-from", "absent"}, "adapter_config.json"},
      {llama() + Words{"--generate", "beam=4"}, "[--generate] got \"beam\""},
      {llama() + Words{"--generate", "greedy,top_k=3"}, "greedy alone"},
      {bert("qa", "squad.json") + Words{"--generate", "greedy"}, "bert does not generate text"},
      {llama() + Words{"--tensor-parallel", "2"}, "[--model] got tensor"},
  };
  OneIn part(3);
  for (const auto& [words, message, steps] : cases) {
    if (!part.take()) continue;
    const auto run = train(folder, 1, words, steps);
    const int code = message == "adapter_config.json" ? 3 : 2;
    EXPECT_EQ(run.code, code) << message << "\n" << run.err;
    EXPECT_NE(run.err.find(message), std::string::npos) << message << "\n" << run.err;
  }
  // Without a configuration, whose scheduler would warm up.
  Process process(Process::Settings{
      Words{ZERO_BINARY_DIR "/bin/zero", "train", "--warmup-steps", "2"} + llama(), {"OMP_NUM_THREADS=1"}, folder, -1});
  EXPECT_EQ(process.wait(60), 2);
  EXPECT_NE(process.err.find("[--warmup-steps] got no CONFIG.json"), std::string::npos) << process.err;
}

}  // namespace
}  // namespace zero::test::train_model_test
