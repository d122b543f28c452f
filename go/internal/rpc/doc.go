// Package rpc is what the lighthouse, the manager server and their clients share about talking to each other:
// addresses, listening, dialing, limits, retries, and the one table of status codes.
//
// It decides nothing about quorums or commits. Everything goes through Network, so that tests run the very
// same servers on in-memory connections and a fake clock.
package rpc
