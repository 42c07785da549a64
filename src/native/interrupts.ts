/** Ctrl-C (SIGINT) as a request to stop after the current step, heard by the native library while it computes. */
import { NativeError } from "../system/errors.ts";
import { Status } from "./abi.ts";
import type { Library } from "./library.ts";

/** Defers SIGINT until it is disposed; a second one, half a second later or more, ends the process at once. */
export class Interrupts implements Disposable {
	/** `announcement`: the line that the first SIGINT writes to standard error; "": none. */
	constructor(
		private readonly library: Library,
		announcement: string,
	) {
		// On a terminal it takes the place of the echoed ^C and of the view, which is drawn anew below it.
		const line = process.stderr.isTTY ? `\r\x1b[J${announcement}` : announcement;
		this.#call("mimo_interrupts_defer", announcement === "" ? null : Buffer.from(`${line}\n\0`));
	}

	/** Whether a SIGINT has come. */
	get asked(): boolean {
		const asked = new Int32Array(1);
		this.#call("mimo_interrupts_asked", asked);
		return asked[0] === 1;
	}

	#call(name: string, ...args: (NodeJS.TypedArray | null)[]): void {
		const status = this.library.symbols[name]!(...args) as number;
		if (status !== Status.ok) throw new NativeError(name, status, String(this.library.symbols.mimo_last_error!()));
	}

	[Symbol.dispose](): void {
		this.#call("mimo_interrupts_restore");
	}
}
