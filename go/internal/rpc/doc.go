// Package rpc has the common parts of gRPC servers and clients of the lighthouse and the manager server: addresses,
// listening, dialing, limits, retries, and the one table of status codes.
//
// It decides nothing about quorums or commits. Everything goes through Network, so that tests run the same servers on
// in-memory connections and a fake clock.
package rpc
