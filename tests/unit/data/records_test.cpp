// Records of training data: what each format means, and what is refused with file and line.
#include <gtest/gtest.h>

#include <fstream>

#include "apps/data/csv.h"
#include "apps/data/json.h"
#include "apps/data/records.h"
#include "support/folder.h"

namespace records_test {
namespace {

class RecordsTest : public testing::Test {
 protected:
  std::string file(const std::string& name, const std::string& content) {
    const auto path = (folder_.path() / name).string();
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
  std::string error_of(const std::string& name, const std::string& content, std::vector<std::string> required = {}) {
    try {
      data::Records records({file(name, content)}, {.required = std::move(required)});
    } catch (const std::exception& e) {
      return e.what();
    }
    return "";
  }
  const zero::test::TempFolder folder_;
};

std::string field(const data::Record& record, const std::string& name) {
  const auto* value = record.find(name);
  return value == nullptr ? "(none)" : *value;
}

TEST_F(RecordsTest, JsonLinesHaveTextsAndNumbersAsTheyAreWritten) {
  const data::Records records(
      {file("a.jsonl",
            "{\"text\": \"one\\n\\u00e9\", \"label\": 3, \"x\" : -1.50 ,\"b\":true,\"n\":null,\"l\":[1]}\n\n \r\n"
            "{\"text\":\"two\",\"label\":\"3\"}")},
      {.required = {"text"}});
  ASSERT_EQ(records.size(), 2);
  const auto first = records.at(0);
  EXPECT_EQ(field(first, "text"), "one\n\u00e9");
  EXPECT_EQ(field(first, "label"), "3");
  EXPECT_EQ(field(first, "x"), "-1.50");
  EXPECT_EQ(field(first, "b"), "true");
  EXPECT_EQ(field(first, "n"), "(none)");
  EXPECT_EQ(field(first, "l"), "(none)");
  EXPECT_TRUE(records.at(1).where.ends_with("a.jsonl:4")) << records.at(1).where;
  EXPECT_THROW((void)records.at(2), std::out_of_range);
}

TEST_F(RecordsTest, CsvHasQuotesCommasAndLineEndsInFields) {
  const data::Records records(
      {file("a.csv", "\xEF\xBB\xBFtext,label\r\n\"a, \"\"b\"\"\r\nc\",x\r\n\r\n,\"\"\nplain,y")}, {});
  ASSERT_EQ(records.size(), 3);
  EXPECT_EQ(field(records.at(0), "text"), "a, \"b\"\r\nc");
  EXPECT_EQ(field(records.at(0), "label"), "x");
  EXPECT_EQ(field(records.at(1), "text"), "");
  EXPECT_EQ(field(records.at(1), "label"), "");
  EXPECT_EQ(field(records.at(2), "label"), "y");
  EXPECT_TRUE(records.at(2).where.ends_with(":6")) << records.at(2).where;
}

TEST_F(RecordsTest, LinesAndDocumentsArePlainText) {
  const auto path = file("a.txt", "one\r\n\n  \ntwo");
  const data::Records lines({path}, {});
  ASSERT_EQ(lines.size(), 2);
  EXPECT_EQ(field(lines.at(0), "text"), "one");
  EXPECT_EQ(field(lines.at(1), "text"), "two");
  const data::Records whole({path, path}, {.format = data::RecordFormat::Document});
  ASSERT_EQ(whole.size(), 2);
  EXPECT_EQ(field(whole.at(1), "text"), "one\r\n\n  \ntwo");
  EXPECT_NE(lines.digest(), whole.digest());
}

// answer_start counts characters: the \u00e9 before the answer is two bytes.
constexpr const char* kSquad = R"({"version": "v2.0", "data": [{"title": "T", "paragraphs": [
  {"qas": [
    {"id": "q1", "question": "Who?", "answers": [{"text": "Ann", "answer_start": 5}, {"text": "Ann Lee", "answer_start": 5}],
     "is_impossible": false},
    {"id": "q2", "question": "Why?", "answers": [], "is_impossible": true, "plausible_answers": [{"text": "x", "answer_start": 0}]}],
   "context": "Caf\u00e9 Ann Lee"},
  {"context": "B c", "qas": [{"id": "q3", "question": "What?", "answers": [{"answer_start": 2, "text": "c"}]}]}]}]})";

TEST_F(RecordsTest, SquadHasARecordForEachQuestion) {
  const data::Records records({file("dev.json", kSquad)}, {.required = {"context", "question", "answers"}});
  ASSERT_EQ(records.size(), 3);
  const auto first = records.at(0);
  EXPECT_EQ(field(first, "id"), "q1");
  EXPECT_EQ(field(first, "context"), "Caf\u00e9 Ann Lee");
  EXPECT_EQ(field(first, "question"), "Who?");
  ASSERT_EQ(first.answers.size(), 2u);
  EXPECT_EQ(first.answers[1].text, "Ann Lee");
  EXPECT_EQ(first.answers[1].begin, 6);
  EXPECT_FALSE(first.impossible);
  EXPECT_TRUE(first.where.ends_with("dev.json:3")) << first.where;
  const auto second = records.at(1);
  EXPECT_TRUE(second.impossible);
  EXPECT_TRUE(second.answers.empty());
  EXPECT_EQ(field(records.at(2), "context"), "B c");
}

TEST_F(RecordsTest, AnswersHaveThreeForms) {
  const std::string context = "\"context\": \"a b c\", ";
  const data::Records records(
      {file("a.jsonl", "{" + context + "\"answers\": {\"text\": [\"b\"], \"answer_start\": [2]}}\n{" + context +
                           "\"answers\": [\"b\", \"z\"]}\n{" + context + "\"answers\": \"c\"}\n{" + context +
                           "\"answers\": []}\n{\"answers\": [{\"text\": \"b\", \"answer_start\": 2}]}")},
      {.required = {"answers"}});
  EXPECT_EQ(records.at(0).answers[0].begin, 2);
  EXPECT_EQ(records.at(1).answers[0].begin, 2);
  EXPECT_EQ(records.at(1).answers[1].begin, -1);
  EXPECT_EQ(records.at(2).answers[0].begin, 4);
  EXPECT_TRUE(records.at(3).impossible);
  EXPECT_EQ(records.at(4).answers[0].begin, -1);
}

TEST_F(RecordsTest, EveryFaultIsNamedWithItsLine) {
  const auto error = error_of(
      "a.jsonl", "{\"text\": \"x\"}\n{\"text\": 1\n[1]\n{\"other\": \"x\"}\n{\"text\": \"a\", \"text\": \"b\"}\n",
      {"text"});
  for (const char* part : {"[records] 4 faults", "a.jsonl:2: got", "a.jsonl:3: got a list",
                           "a.jsonl:4: got the fields \"other\"", "a.jsonl:5: got the key \"text\" twice"})
    EXPECT_NE(error.find(part), std::string::npos) << part << "\n" << error;
  std::string many;
  for (int i = 0; i < 30; ++i) many += "x\n";
  EXPECT_NE(error_of("b.jsonl", many).find("and 10 more"), std::string::npos);
}

TEST_F(RecordsTest, WrongFilesAreRefused) {
  const std::vector<std::array<const char*, 3>> cases{
      {"a.csv", "a,b\n\"x", "a.csv:2: got a quote that is never closed"},
      {"a.csv", "a,b\nx\"y,z\n", "a quote inside a field"},
      {"a.csv", "a,b\n\"x\"y,z\n", "text behind the closing quote"},
      {"a.csv", "a,b\n1,2,3\n", "a.csv:2: got 3 fields, expected 2"},
      {"a.csv", "a,b\n", "no record"},
      {"a.txt", "ok\n\xff\n", "a.txt:2: got bytes that are not UTF-8"},
      {"a.txt", "", "an empty file"},
      {"a.txt", " \n\n", "no record"},
      {"a.jsonl", "{\"a\": \"\\ud800\"}", "a.jsonl:1"},
      {"a.jsonl", "{\"a\": [[[[[[[[1]]]]]]]]}", "levels"},
      {"a.jsonl", "{\"a\": 1e999}", "a.jsonl:1"},
      {"a.jsonl", "{\"context\": \"a b\", \"answers\": [{\"text\": \"b\", \"answer_start\": 1}]}",
       "the answer \"b\" with start 1"},
      {"a.jsonl", "{\"answers\": {\"text\": [\"b\"], \"answer_start\": []}}", "lists of the same length"},
      {"a.json", "[]", "list \"data\""},
      {"a.json", "{\"data\": [{}]}", "\"paragraphs\""},
      {"a.json", "{\"data\": [{\"paragraphs\": [{\"context\": \"x\"}]}]}", "list of questions"},
      {"a.json",
       "{\"data\": [{\"paragraphs\": [{\"qas\": [{\"question\": \"q\", \"answers\": []}], \"context\": \"x\"}]}]}",
       "a question without an answer"},
      {"a.json", "{\"data\": [{\"paragraphs\": [{\"qas\": [{\"answers\": []}], \"context\": \"x\"}]}]}",
       "text of a question"},
  };
  for (const auto& [name, content, expected] : cases) {
    const auto error = error_of(name, content);
    EXPECT_NE(error.find(expected), std::string::npos) << content << "\n" << error;
  }
  EXPECT_NE(error_of("missing/../a.txt", "x").find("[records]"), std::string::npos);
  EXPECT_THROW((void)data::record_format("xml"), std::invalid_argument);
  EXPECT_EQ(data::record_format("squad"), data::RecordFormat::Squad);
}

TEST_F(RecordsTest, RecordsBeyondTheLimitAreRefusedWithoutACopy) {
  const std::string kib(1024, 'x');
  const auto large = [&](const std::string& name, const std::string& begin) {
    const auto path = (folder_.path() / name).string();
    std::ofstream out(path, std::ios::binary);
    out << begin;
    for (int i = 0; i < (64 << 10); ++i) out << kib;  // 64 MiB
    out << "\n";
    return path;
  };
  const auto refused = [](const std::string& path, data::RecordFormat format) {
    try {
      data::Records records({path}, {.format = format});
    } catch (const std::exception& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const auto text = large("a.txt", "first\n-");
  EXPECT_NE(
      refused(text, data::RecordFormat::Document).find("a.txt:1: got a record of 67108872 bytes, expected at most"),
      std::string::npos);
  EXPECT_NE(refused(text, data::RecordFormat::Lines).find("a.txt:2: got a record of 67108865 bytes"),
            std::string::npos);
  EXPECT_NE(refused(text, data::RecordFormat::Csv).find("a.txt:2: got a record of 67108865 bytes"), std::string::npos);
  EXPECT_NE(refused(text, data::RecordFormat::Jsonl).find("a.txt:2: got a record of 67108865 bytes"),
            std::string::npos);
}

TEST(JsonTest, ValuesAreCounted) {
  const auto fault_of = [](const std::string& text, std::size_t values, const data::JsonObjectEnd& end) -> std::string {
    try {
      (void)data::read_json(text, {.values = values}, end);
    } catch (const data::JsonFault& fault) {
      return fault.what();
    }
    return "";
  };
  const std::string text = R"({"a": [1, null, {"b": "c"}, {"b": "d"}]})";
  EXPECT_EQ(fault_of(text, 8, nullptr), "");
  EXPECT_EQ(fault_of(text, 7, nullptr), "more than 7 values");
  // An object that the tree does not keep counts while it is read.
  const auto drop = [](int depth, const data::Json&) { return depth != 3; };
  EXPECT_EQ(fault_of(text, 6, drop), "");
  EXPECT_EQ(fault_of(text, 5, drop), "more than 5 values");
}

TEST_F(RecordsTest, DigestsAreOfContentsNotNames) {
  const data::Records one({file("a.txt", "x\ny")}, {}), two({file("b.txt", "x\ny")}, {}),
      three({file("c.txt", "x\nz")}, {});
  EXPECT_EQ(one.digest(), two.digest());
  EXPECT_NE(one.digest(), three.digest());
}

}  // namespace
}  // namespace records_test
