// The panels of the page, in the order of their tabs. One that is not listed is not in the page.
import { attribute } from "./attribute.js";
import { change } from "./change.js";
import { generate } from "./generate.js";
import { look } from "./look.js";
import { operate } from "./operate.js";
import { train } from "./train.js";

/**
 * Each has `name`, its word in links and in `parameters(name, ...)`; `title`, on its tab; `View`, a component; and
 * `usesModel`, whether it is shown beside the module tree and, unless it `hasOwnInput`, the input of the chosen model. One with `isOffered`, a
 * signal, has a tab only while that is true.
 */
export const PANELS = [look, change, attribute, generate, train, operate];
