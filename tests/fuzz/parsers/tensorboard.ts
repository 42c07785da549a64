import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { EventFile, maskedCrc, readScalars } from "../../../src/observe/tensorboard.ts";
import { type FuzzParser, inputName } from "../parser.ts";

/** Writes the checksums that each record should have, as far as lengths make sense. */
function withChecksums(bytes: Uint8Array): Uint8Array {
	const made = Buffer.from(bytes);
	for (let at = 0; at + 16 <= made.length; ) {
		const end = at + 12 + Number(made.readBigUInt64LE(at));
		made.writeUInt32LE(maskedCrc(made.subarray(at, at + 8)), at + 8);
		if (end + 4 > made.length) break;
		made.writeUInt32LE(maskedCrc(made.subarray(at + 12, end)), end);
		at = end + 4;
	}
	return made;
}

export default {
	about: "a TensorBoard event file",
	open: () => {
		const folder = mkdtempSync(join(tmpdir(), `${inputName}-`));
		const written = join(folder, "seed");
		const file = new EventFile(written);
		file.write(1, [
			["lm loss", 5.5],
			["grad norm", 0.5],
		]);
		file.close();
		const seed = readFileSync(join(written, readdirSync(written)[0]!));
		rmSync(written, { recursive: true });
		return {
			seeds: [seed],
			repair: withChecksums,
			parse: (bytes) => {
				writeFileSync(join(folder, "tfevents"), bytes);
				readScalars(folder);
			},
			[Symbol.dispose]: () => rmSync(folder, { recursive: true, force: true }),
		};
	},
} satisfies FuzzParser;
