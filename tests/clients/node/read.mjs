// Reads one reply with an SDK as people use it, only its text, and prints what it saw:
//   node read.mjs CLIENT BASE_URL KEY MODEL WORDS
// The last line is JSON: {"text": …, "error": …}; error is null after a success.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";
import OpenAI from "openai";

const [client, baseURL, apiKey, model, words] = process.argv.slice(2);
const messages = [{ role: "user", content: words }];

const readers = {
  async *"openai-chat"() {
    const openai = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
    const stream = await openai.chat.completions.create({ model, messages, stream: true });
    for await (const chunk of stream) yield chunk.choices[0]?.delta?.content ?? "";
  },
  async *"openai-responses"() {
    const openai = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
    const stream = await openai.responses.create({ model, input: words, stream: true });
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") yield event.delta;
    }
  },
  "ai-sdk-chat": () => textOf(createOpenAI({ baseURL, apiKey }).chat(model)),
  "ai-sdk-responses": () => textOf(createOpenAI({ baseURL, apiKey }).responses(model)),
  "ai-sdk-compatible": () =>
    textOf(createOpenAICompatible({ name: "holdfast", baseURL, apiKey })(model)),
};

// The AI SDK reports an error inside a stream to onError, and its text just ends.
async function* textOf(languageModel) {
  let failure = null;
  const { textStream } = streamText({
    model: languageModel,
    messages,
    maxRetries: 0,
    onError({ error }) {
      failure = error;
    },
  });
  yield* textStream;
  if (failure) throw failure;
}

const seen = { text: "", error: null };
try {
  for await (const part of readers[client]()) seen.text += part;
} catch (error) {
  seen.error = String(error?.message ?? error) || "an error without a message";
}
console.log(JSON.stringify(seen));
