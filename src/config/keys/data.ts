/** Training and validation data (docs/spec/runtime.md §8). */
import { choice, defaulting, derived, integer, optional, path, text } from "../field.ts";

export const dataKeys = {
	"dataset-provider": derived(
		choice(["mock", "text", "tokens", "energon"]),
		"energon when data-path is a folder, URL, .jsonl or .yaml file; tokens when it is a .safetensors file; text when it is plain text and the model has no encoder; mock without data-path",
		"Source of the samples.",
		{ megatron: "mock" },
	),
	"data-path": optional(
		path,
		"A text file, a .safetensors file with a tensor named tokens, or Energon data: a prepared folder, .jsonl file or metadataset .yaml.",
	),
	"valid-data-path": optional(
		path,
		"Validation data; unset: the part of data-path that split, or valid-data-split-part, keeps back.",
	),
	tokenizer: optional(path, "A tokenizer.json, or a folder with one; unset: bytes.", { aliases: ["tokenizer-model"] }),
	split: defaulting(text, "969,30,1", "Shares of data-path for training, validation and test."),
	"mock-dataset-size": defaulting(integer(1), 10000, "Mock samples of one rank."),
} as const;
