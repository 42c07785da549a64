/** A Python script of this folder in a process of its own, which answers each line of JSON with a line. */
import { join } from "node:path";

export class PythonScript implements Disposable {
	readonly #name: string;
	readonly #child: Bun.Subprocess<"pipe", "pipe", "inherit">;
	readonly #lines: AsyncIterator<string>;

	constructor(python: string, name: string) {
		this.#name = name;
		this.#child = Bun.spawn([python, join(import.meta.dir, name)], {
			stdin: "pipe",
			stdout: "pipe",
			stderr: "inherit",
			env: { ...process.env, TRANSFORMERS_VERBOSITY: "error", HF_HUB_DISABLE_PROGRESS_BARS: "1" },
		});
		this.#lines = linesOf(this.#child.stdout);
	}

	/** The script's answer to a request. Throws when the script has ended. */
	async ask(request: unknown): Promise<string> {
		this.#child.stdin.write(`${JSON.stringify(request)}\n`);
		const { value, done } = await this.#lines.next();
		if (done) throw new Error(`${this.#name} ended early; its own message is above.`);
		return value;
	}

	[Symbol.dispose](): void {
		this.#child.kill();
	}
}

async function* linesOf(stream: ReadableStream<Uint8Array>): AsyncGenerator<string> {
	const decoder = new TextDecoder();
	let rest = "";
	for await (const chunk of stream) {
		const parts = (rest + decoder.decode(chunk, { stream: true })).split("\n");
		rest = parts.pop()!;
		yield* parts;
	}
}
