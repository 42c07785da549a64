/** `mimo parity` on processes: references with images of any size. */
import { agreesOnProcesses, staged } from "./agreement.ts";

agreesOnProcesses("mimo-1x1-dynamic", [null, "1", "1+1", "tp2+tp2ep2", "tp2+1", ...staged]);
agreesOnProcesses("mimo-tp2-tp2ep2-dynamic", [
	...[null, "1", "1+1", "tp2+tp2ep2", "tp4+tp2ep2", "1+tp2dp2ep2etp2"],
	...staged,
]);
