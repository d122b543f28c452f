package rpc

import "google.golang.org/grpc/metadata"

// managerKey is the header of a relay's sessions that names its manager server.
const managerKey = "torchft-manager"

// ManagerHeader says that a relay is connected to the manager server at an address.
func ManagerHeader(address string) metadata.MD { return metadata.Pairs(managerKey, address) }

// ManagerOf is the address in such a header, empty if there is none.
func ManagerOf(header metadata.MD) string {
	if values := header.Get(managerKey); len(values) == 1 {
		return values[0]
	}
	return ""
}
