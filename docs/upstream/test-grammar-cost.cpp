// Grammars that hang, exhaust or end the process before the patch 'grammar: bound what a grammar
// may cost'.
//
// In the style of upstream's tests: no framework, an assertion that fails ends the program. Give
// the number of one case to run it alone; without the patch each of 1 to 3 has to be stopped from
// outside.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "llama-grammar.h"

static llama_grammar* make(const std::string& text) {
  return llama_grammar_init_impl(nullptr, text.c_str(), "root", false, nullptr, 0, nullptr, 0);
}

static void check(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "failed: %s\n", what);
  exit(1);
}

// 1. b is empty by way of c, so a comes to itself: matching pushed stacks without end.
static void hidden_left_recursion() {
  check(make("root ::= a\na ::= b a \"x\" | \"y\"\nb ::= c\nc ::= \"\"\n") == nullptr,
        "left recursion through an empty rule is refused");
}

// 2. Two ways through each of 64 rules: the search for left recursion walked 2^64 paths.
static void many_paths() {
  std::string text = "root ::= r0\n";
  for (int i = 0; i < 64; i++) {
    const std::string next = "r" + std::to_string(i + 1);
    text += "r" + std::to_string(i) + " ::= " + next + " | " + next + "\n";
  }
  llama_grammar* grammar = make(text + "r64 ::= \"a\"\n");
  check(grammar != nullptr, "a grammar without left recursion is read");
  llama_grammar_free_impl(grammar);
}

// 3. 1 - 3 optional repetitions, in unsigned numbers.
static void reversed_bounds() {
  check(make("root ::= \"a\"{3,1}\n") == nullptr, "a lower bound above the upper one is refused");
}

// 4. What was right before still is.
static void ordinary_grammars() {
  for (const char* text : {
           "root ::= \"a\" root | \"b\"\n",
           "root ::= a* b\na ::= \"x\" | \"y\" a\nb ::= [0-9]{2,4}\n",
           "root ::= (a | b)?\na ::= b \"-\"\nb ::= \"+\"?\n",
       }) {
    llama_grammar* grammar = make(text);
    check(grammar != nullptr, text);
    llama_grammar_free_impl(grammar);
  }
  check(make("root ::= root \"a\" | \"b\"\n") == nullptr, "plain left recursion is refused");
  check(make("root ::= a\na ::= \"x\"? a\n") == nullptr,
        "left recursion behind an option is refused");
}

int main(int argc, char** argv) {
  void (*const cases[])() = {hidden_left_recursion, many_paths, reversed_bounds, ordinary_grammars};
  const int only = argc > 1 ? atoi(argv[1]) : 0;
  for (int i = 0; i < 4; i++) {
    if (only == 0 || only == i + 1) cases[i]();
  }
  return 0;
}
