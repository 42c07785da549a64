/** Claims a folder at a moment, says "mine" or "refused", and keeps it until all others have been refused. */
import { newRunName, ownHolder, WriterClaim } from "../../../src/checkpoint/native/writer-lock.ts";

const [root, at] = process.argv.slice(2) as [string, string];
const times = { beat: 50, silence: 300, farewell: 200, handover: 200 };
await Bun.sleep(Number(at) - Date.now());
const claim = new WriterClaim(root, ownHolder(newRunName()), times);
try {
	for (;;) {
		const { lock } = claim.attempt();
		if (lock) {
			await Bun.sleep(1500);
			console.log("mine");
			lock[Symbol.dispose]();
			break;
		}
		await Bun.sleep(5);
	}
} catch (error) {
	console.log(`refused ${(error as Error).message}`);
}
