package replica

import (
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"

	"github.com/torchft/torchft/go/internal/rpc"
)

// MaxCluster bounds the lighthouses at a cluster's start. More would only make each proposal slower.
const MaxCluster = 7

// ParseCluster parses the value of --cluster: the addresses of 3, 5 or 7 lighthouses, separated by commas.
func ParseCluster(list string) ([]string, error) {
	addresses, err := rpc.ParseAddresses("--cluster", list)
	if err != nil {
		return nil, err
	}
	if n := len(addresses); n < 3 || n > MaxCluster || n%2 == 0 {
		return nil, fmt.Errorf("--cluster is %q: it has %d addresses, but must have 3, 5 or 7: of an even "+
			"number no more may fail than of one less", list, n)
	}
	for i, address := range addresses {
		addresses[i] = strings.TrimSuffix(address, "/")
	}
	slices.Sort(addresses)
	if unique := slices.Compact(slices.Clone(addresses)); len(unique) != len(addresses) {
		return nil, fmt.Errorf("--cluster is %q: an address is in it twice", list)
	}
	return addresses, nil
}

// Self returns which address of a list is this lighthouse: the advertised one, else the only one with the
// port of bind whose host is this machine. An empty advertise stands for none.
func Self(list []string, advertise, bind string, ownHost func(host string) bool) (string, error) {
	text := strings.Join(list, ",")
	if advertise = strings.TrimSuffix(advertise, "/"); advertise != "" {
		if !slices.Contains(list, advertise) {
			return "", fmt.Errorf("--advertise is %q, which is not in --cluster %s: it must be one of "+
				"these addresses", advertise, text)
		}
		return advertise, nil
	}
	_, port, err := net.SplitHostPort(bind)
	if err != nil {
		return "", fmt.Errorf("--bind is %q: it must be host:port: %w", bind, err)
	}
	var own []string
	for _, address := range list {
		if u, err := url.Parse(address); err == nil && u.Port() == port && ownHost(u.Hostname()) {
			own = append(own, address)
		}
	}
	switch len(own) {
	case 1:
		return own[0], nil
	case 0:
		return "", fmt.Errorf("--cluster is %q: none of its addresses has the port %s and a name of this "+
			"host: add this lighthouse, or name its address with --advertise", text, port)
	}
	return "", fmt.Errorf("--cluster is %q: this lighthouse may be each of %s: name one with --advertise",
		text, strings.Join(own, ", "))
}
