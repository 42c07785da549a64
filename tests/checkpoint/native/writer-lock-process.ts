/**
 * Says "ready", claims a folder at the first line of its input, says "mine" or "refused", and keeps the folder until its
 * input ends.
 */
import { newRunName, ownHolder, WriterClaim } from "../../../src/checkpoint/native/writer-lock.ts";

const root = process.argv[2]!;
const times = { beat: 50, silence: 300, farewell: 200, handover: 200 };
const input = Bun.stdin.stream().getReader();
console.log("ready");
await input.read();
const claim = new WriterClaim(root, ownHolder(newRunName()), times);
try {
	for (;;) {
		const { lock } = claim.attempt();
		if (lock) {
			console.log("mine");
			await input.read();
			lock[Symbol.dispose]();
			break;
		}
		await Bun.sleep(5);
	}
} catch (error) {
	console.log(`refused ${(error as Error).message}`);
}
