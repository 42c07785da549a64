/** `mimo data verify`: replays reference data of the Python package and names the first difference of every file. */
import { defineCommand } from "citty";
import { exitCodes } from "../../native/exit-codes.ts";
import { Images } from "../../native/images.ts";
import { openLibrary } from "../../native/library.ts";
import { verifyGolden } from "../../parity/energon/verify.ts";

const args = {
	golden: { type: "string", required: true, description: "Folder of reference data (orders/, states/, rng/, …)." },
	only: { type: "string", description: "Only files whose name contains this." },
	verbose: { type: "boolean", description: "Name the files without differences too." },
} as const;

export default defineCommand({
	meta: { name: "verify", description: "Replay reference data of megatron-energon; exit 1 when anything differs." },
	args,
	run: async ({ args: given }) => {
		const images = new Images(await openLibrary("cpu"));
		const started = performance.now();
		let files = 0;
		let differing = 0;
		for (const { file, difference } of verifyGolden(given.golden, images, (name) => name.includes(given.only ?? ""))) {
			files++;
			if (difference !== null) differing++;
			if (difference !== null) console.log(`${file}: ${difference}`);
			else if (given.verbose) console.log(`${file}: equal`);
		}
		const seconds = ((performance.now() - started) / 1000).toFixed(1);
		console.log(`${files} files, ${differing} with differences, ${seconds} s`);
		if (differing > 0 || files === 0) process.exitCode = exitCodes.failure;
	},
});
