import { resolveConfiguration } from "../../../src/config/resolve.ts";
import { UserError } from "../../../src/system/errors.ts";
import type { FuzzParser } from "../parser.ts";

const lines = [
	["--preset", "nemotron-tiny", "--train-iters", "100", "--lr", "3e-4", "--llm-tp", "2", "--llm-ep", "2", "--bf16"],
	[
		"--preset=nemotron-vlm-tiny",
		"--train-iters=64",
		"--encoder-tp",
		"2",
		"--hybrid-layer-pattern",
		"M*E-",
		"--seed",
		"7",
	],
	["--preset", "nemotron-tiny", "--train-iters", "50", "--num-experts", "8", "--moe-router-topk", "2", "--no-bf16"],
];

export default {
	about: "flags of a command, an argument a line",
	open: () => ({
		seeds: lines.map((line) => Buffer.from(line.join("\n"))),
		dictionary: [
			...[
				"--no-",
				"--",
				"=",
				"\n",
				"--hidden-size\n",
				"--num-attention-heads\n",
				"--mamba-num-heads\n",
				"--vocab-size\n",
			],
			...[
				"--llm-dp\n",
				"--llm-expert-tp\n",
				"--encoder-dp\n",
				"--global-batch-size\n",
				"--seq-length\n",
				"4294967296",
				"-1",
			],
		],
		parse: (bytes) => {
			const given = new TextDecoder().decode(bytes).split("\n");
			// A file of this machine must not become an input.
			resolveConfiguration(given.filter((argument) => !argument.startsWith("--config")));
		},
		// A misspelt flag is compared with every other, 0.4 ms each, and a case may have two thousand of them.
		milliseconds: 4000,
		refuses: (error) => error instanceof UserError && error.message.length <= 100_000,
	}),
} satisfies FuzzParser;
