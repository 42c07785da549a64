/** Runs a program and stops it at one of its calls that concern the files of a folder (watch_calls.cpp). */
import { expect } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { absent } from "./absent.ts";

/** The `nth` call (from 1) such as "rename a b" from the first that contains `from` on; paths are below the watched folder. */
export interface Stop {
	/** kill: SIGKILL before the call; hold: it never returns, nor do later ones. */
	readonly action: "kill" | "hold";
	readonly call: string;
	readonly from?: string;
	readonly nth?: number;
}

export interface Watched {
	/** 137 after a kill. */
	readonly exitCode: number;
	readonly stdout: string;
	readonly stderr: string;
	/** Calls that open, make, rename or remove a name below the folder, in order. */
	readonly calls: readonly string[];
}

export class CallWatcher {
	readonly #tool: string;
	readonly #list: string;
	/** Whether the kernel lets a program watch the calls of another here. */
	readonly works: boolean;

	/** Builds the tool in `scratch`. */
	constructor(private readonly scratch: string) {
		this.#tool = join(scratch, "watch_calls");
		this.#list = join(scratch, "calls");
		const source = join(import.meta.dir, "watch_calls.cpp");
		const flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror"];
		expect(Bun.spawnSync(["c++", ...flags, "-o", this.#tool, source]).stderr.toString()).toBe("");
		this.works =
			this.run(scratch, null, ["true"]).exitCode === 0 ||
			absent("the right to watch the calls of a program", "a kernel from 5.8 on, with seccomp") !== null;
	}

	/** Runs `command` in the scratch folder; `folder`: absolute. */
	run(folder: string, stop: Stop | null, command: readonly string[], env: Record<string, string> = {}): Watched {
		const { action, call, from = "", nth = 1 } = stop ?? { action: "kill", call: "", nth: 0 };
		const { exitCode, stdout, stderr } = Bun.spawnSync(
			[this.#tool, action, folder, this.#list, from, call, String(nth), ...command],
			{ cwd: this.scratch, env: { ...process.env, MIMO_DEBUG: "0", ...env }, stdout: "pipe", stderr: "pipe" },
		);
		const calls = readFileSync(this.#list, "utf8").trim().split("\n");
		return { exitCode, stdout: stdout.toString(), stderr: stderr.toString(), calls };
	}
}
