// Continues a prompt with node-llama-cpp, greedily:  node generate.mjs MODEL PROMPT [N]
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const [path, prompt, n = "8"] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.warn});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({contextSize: 256, threads: 2});
const sequence = context.getSequence();
const tokens = [];
for await (const token of sequence.evaluate(model.tokenize(prompt), {temperature: 0})) {
    tokens.push(token);
    if (tokens.length >= Number(n)) break;
}
console.log(JSON.stringify(prompt + model.detokenize(tokens)));
await context.dispose();
