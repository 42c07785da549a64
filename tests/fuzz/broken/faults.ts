/** A parser with every fault that the driver must see. */
import { UserError } from "../../../src/system/errors.ts";
import { type FuzzParser, inputName } from "../parser.ts";

const kept: Uint8Array[] = [];

/** Keeps a processor busy, however many others share it. */
function compute(microseconds: number): void {
	const start = process.cpuUsage();
	for (let used = 0; used < microseconds; ) {
		const { user, system } = process.cpuUsage(start);
		used = user + system;
	}
}

export default {
	about: "nothing: it fails in every way there is",
	open: () => ({
		seeds: [Buffer.from("0"), Buffer.from("00")],
		milliseconds: 60,
		bytes: 2 ** 24,
		// The first byte of a seed after a flip of one bit.
		parse: ([first]) => {
			switch (first) {
				case 0x31:
					throw new UserError("It is bad.");
				case 0x32:
					throw new UserError(`${inputName} is bad.`);
				case 0x34:
					return (undefined as unknown as { a: number }).a;
				case 0x20:
					return compute(100_000);
				case 0x10:
					return void kept.push(new Uint8Array(2 ** 26).fill(1));
				case 0x70:
					for (;;);
				case 0xb0:
					process.exit(3);
			}
		},
	}),
} satisfies FuzzParser;
