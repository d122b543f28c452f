package rpc

import "google.golang.org/grpc/metadata"

// managerKey is the header of a relay's sessions that names its manager server.
const managerKey = "torchft-manager"

// ManagerHeader returns the header by which a relay names the address of its manager server.
func ManagerHeader(address string) metadata.MD { return metadata.Pairs(managerKey, address) }

// ManagerOf returns the address in such a header, empty if there is none.
func ManagerOf(header metadata.MD) string {
	if values := header.Get(managerKey); len(values) == 1 {
		return values[0]
	}
	return ""
}
