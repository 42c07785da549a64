/** Rank program of the tests of verify: compares a layout with a reference that may have been made from other keys. */
import { namedTopology, parseLayout } from "../../../src/parallel/layout.ts";
import { World } from "../../../src/parallel/world.ts";
import { planOf } from "../../../src/parity/verify/samples.ts";
import { verifyOnRank } from "../../../src/parity/verify/verify.ts";
import { deviceOfRank, placeOfRank } from "../../parallel/ranks.ts";
import { smallSubject } from "./subject.ts";

const [folder, layout, changes] = process.argv.slice(2) as [string, string, string];
using place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const subject = smallSubject(JSON.parse(changes));
const plan = planOf(namedTopology(parseLayout(layout)), { ...subject, samples: subject.samples.length });
await verifyOnRank(world, plan, subject, folder);
