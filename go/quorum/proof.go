package quorum

// This file has no code. It proves that a job with several lighthouses has one branch, by the rule of succession.go. The rule's
// assumptions are in docs/correctness.md.
//
// Two sets of members that outvote the rest of a quorum share a member. The predecessor of a quorum is the last one that its lighthouse
// knew; a quorum comes after its predecessor, and after all that the predecessor comes after. Ids rise along this order. A quorum that
// is formed again with the same members and id is the same one.
//
// # Claim
//
// If quorum Q commits, and R is a quorum of the same beginning with a higher id, then R comes after Q.
//
// # Facts
//
// Q commits only after all of its members have heard of it, because its process group and each collective need all of them.
//
//  1. The votes of a member are in the order of ids. If it asks for one quorum and later for another, and is in both, the later one has
//     no lower id: between two lighthouses it carries the term of the first. The vote of an ended member goes to one quorum first, G,
//     and no quorum that it had asked for has an id above G's.
//  2. If a member heard of Q and is in R, whose id is higher, then R's predecessor has an id not below Q's. Either it heard of Q before
//     it asked for R: then it showed Q, and its lighthouse decided nothing before. Or it heard of Q afterwards, on the same stream,
//     since a member leaves one lighthouse before it asks another: then that lighthouse formed Q itself. The same holds for G in place
//     of R: the end of a member that knows a quorum which its lighthouse does not know is no vote (promised).
//  3. The vote of an ended member counts for G and, through the bases, for successors of G, and for no other quorum: the lighthouse
//     forgets it when G is formed (spend). A waiting member has no such vote besides its request (over).
//
// A member that claims a later quorum and does not show it is refused after three questions; below it counts as not having asked.
// Failback (failback.go) is no part of the proof.
//
// # Proof
//
// Assume that R does not come after Q. Let A be the last quorum that both come after, or that one of them is and the other comes after.
// A is not Q by assumption, and not R, whose id is above Q's. So the ways from A to Q and to R share no quorum but A. Let X be the
// members of A. Until X leaves the base, every quorum on either way has votes that outvote X.
//
// Let q be the last quorum on Q's way before X leaves the base, or Q if X stays in it. Then the members that heard of q, together with
// the votes of ended members given until q, outvote X: if X leaves, that is the condition for it to leave; if X stays, all members of Q
// heard of Q. Let r be the same on R's way, or R if X stays in the base. q and r differ, since the ways share only A.
//
// First case: q's id is below r's. Let s be the first quorum on R's way with an id above q's: it is r, or comes before r. Its votes
// outvote X too, so they share a member m with those of q.
//
//   - m heard of q, and asked for s, or its vote was given to a G up to s: by 2, the predecessor of s, or of G, has an id not below q's.
//     It is not q, so its id is above q's, and s was not the first.
//   - m's vote was given on Q's way to a G up to q, and m asked for s: by 1, the id of s is not above G's, and so not above q's.
//   - m's vote was given on both ways: by 3, both come after one G, which comes after A.
//
// Second case: r's id is below q's. Then r is not R, whose id is above Q's. So members that heard of r outvote X with the votes given
// until r, and the same holds with the ways exchanged. Each case contradicts the assumption.
