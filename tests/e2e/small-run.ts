/** A folder with a small text, and `mimo train` of a small model on it. */
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { deviceFlags, mimo, type Outcome } from "../commands/mimo.ts";

/** Steps and evaluations of a JSON log, without its events. */
export function loggedSteps(file: string): Record<string, unknown>[] {
	return readFileSync(file, "utf8")
		.trim()
		.split("\n")
		.map((line) => JSON.parse(line) as Record<string, unknown>)
		.filter(({ event }) => event === undefined);
}

export class SmallRun implements Disposable {
	readonly folder = mkdtempSync(join(tmpdir(), "mimo-train-"));

	constructor() {
		const words = ["in", "the", "beginning", "was", "a", "word", "and", "it", "ended", "here"];
		let state = 1;
		const text = Array.from({ length: 4000 }, () => {
			state = (state * 48271) % 2147483647;
			return words[state % words.length];
		});
		writeFileSync(this.path("text.txt"), text.join(" "));
	}

	path(name: string): string {
		return join(this.folder, name);
	}

	/** Trains in the folder; flags given here win. */
	train(flags: readonly string[], environment: Record<string, string> = {}): Outcome {
		const small = `--preset nemotron-tiny --hidden-size 64 --seq-length 64 --log-interval 5 --lr-warmup-iters 1 ${deviceFlags}`;
		return mimo(["train", ...small.split(" "), "--data-path", "text.txt", ...flags], this.folder, environment);
	}

	[Symbol.dispose](): void {
		rmSync(this.folder, { recursive: true });
	}
}
