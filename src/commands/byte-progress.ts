/** Progress line of a command that reads or writes many bytes; shown on terminals alone. */
import { formatBytes } from "../checkpoint/index.ts";
import { duration, Terminal } from "../observe/progress.ts";

export class ByteProgress {
	readonly #terminal = new Terminal(process.stderr);
	readonly #start = performance.now();
	#bytes = 0;
	#drawn = 0;

	constructor(
		/** The activity, such as "writing". */
		readonly what: string,
		/** Expected bytes; null: unknown. */
		readonly total: number | null,
	) {}

	add(bytes: number): void {
		this.#bytes += bytes;
		const now = performance.now();
		if (!this.#terminal.interactive || now - this.#drawn < 100) return;
		this.#drawn = now;
		const seconds = Math.max(1e-3, (now - this.#start) / 1000);
		const rate = this.#bytes / seconds;
		const parts = [`${this.what} ${formatBytes(this.#bytes)}`, `${formatBytes(rate)}/s`];
		if (this.total !== null && this.total > 0) {
			const done = Math.min(1, this.#bytes / this.total);
			parts.unshift("█".repeat(Math.floor(done * 20)).padEnd(20, "░"));
			parts.push(`${duration((this.total - this.#bytes) / rate)} left`);
		}
		this.#terminal.show([parts.join("  ")]);
	}

	done(): void {
		this.#terminal.show([]);
	}
}
