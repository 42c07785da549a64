/** Sources of configuration values, and mistakes in them. */
import type { Key } from "./schema.ts";

export type Origin =
	| { readonly source: "default" }
	| { readonly source: "derived"; readonly from: string }
	| { readonly source: "checkpoint"; readonly path: string }
	| { readonly source: "preset"; readonly name: string }
	| { readonly source: "file"; readonly file: string; readonly line: number }
	| { readonly source: "flag"; readonly name: string }
	/** A Hugging Face folder that the run starts from: `file` is its config.json. */
	| { readonly source: "folder"; readonly file: string }
	| { readonly source: "program" };

/** One given value, not yet checked. */
export interface Entry {
	readonly key: Key;
	readonly value: unknown;
	readonly origin: Origin;
}

/** A flag of Megatron that is no key, and whose meaning depends on other keys (upstream-rewrites.ts). */
export interface Aside {
	/** Without dashes. */
	readonly name: string;
	readonly values: readonly string[];
	readonly origin: Origin;
}

/** A key's value in a folder that the run starts from. */
export interface FolderValue {
	readonly key: Key;
	readonly value: unknown;
	/** The file that contains the value. */
	readonly from: string;
	/** Whether the weights have this value, so that another given value is an error; otherwise it is a default. */
	readonly fixed: boolean;
}

/** Reads the folders that the given values name. Throws a UserError for one that cannot be read. */
export type FolderReader = (given: (key: Key) => unknown) => readonly FolderValue[];

/** A mistake: where it is, and the sentence about it. */
export interface Problem {
	readonly where: string;
	readonly message: string;
	/** A flag that gives this key removes the mistake. */
	readonly unlessGiven?: Key;
}

/** Values that a command line or a file gives. */
export interface Given {
	readonly entries: readonly Entry[];
	readonly asides: readonly Aside[];
	/** Sentences about flags that something else stands for. */
	readonly notes: readonly string[];
	readonly problems: readonly Problem[];
}

/** "run.yaml:12", "--lr", "preset nemotron-tiny". */
export function describeOrigin(origin: Origin): string {
	switch (origin.source) {
		case "default":
			return "default";
		case "derived":
			return `derived: ${origin.from}`;
		case "checkpoint":
			return `checkpoint ${origin.path}`;
		case "preset":
			return `preset ${origin.name}`;
		case "file":
			return `${origin.file}:${origin.line}`;
		case "flag":
			return `flag ${origin.name}`;
		case "folder":
			return origin.file;
		case "program":
			return "program";
	}
}
