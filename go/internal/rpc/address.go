package rpc

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/torchft/torchft/go/internal/auth"
)

// Address is the address of a server, ours or an upstream one.
type Address struct {
	HostPort string
	TLS      bool // https://
}

// ParseAddress parses "http://host:port" or "https://host:port". Errors name the setting.
func ParseAddress(setting, address string) (Address, error) {
	bad := func(why string) error {
		return fmt.Errorf("%s is %q: it must be http://host:port or https://host:port, but %s", setting,
			address, why)
	}
	u, err := url.Parse(address)
	switch {
	case err != nil && !strings.Contains(address, "://"):
		return Address{}, bad("it does not begin with http:// or https://")
	case err != nil:
		return Address{}, bad("it is not a URL")
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "" && u.Opaque != "":
		return Address{}, bad("it does not begin with http:// or https://")
	case u.Hostname() == "":
		return Address{}, bad("the host is missing")
	case u.Port() == "":
		return Address{}, bad("the port is missing")
	case u.User != nil, u.Path != "" && u.Path != "/", u.RawQuery != "", u.Fragment != "":
		return Address{}, bad("there is more than a host and a port")
	}
	if port, err := strconv.ParseUint(u.Port(), 10, 16); err != nil || port == 0 {
		return Address{}, bad("the port is not between 1 and 65535")
	}
	return Address{HostPort: u.Host, TLS: u.Scheme == "https"}, nil
}

// MaxLighthouses is how many lighthouses a list may have. It is more than a cluster has, so that a list may
// have old addresses, too.
const MaxLighthouses = 16

// ParseAddresses parses addresses separated by commas, or those in the file whose absolute path is given.
// Members try them in this order.
func ParseAddresses(setting, addresses string) (list []string, err error) {
	if filepath.IsAbs(addresses) {
		text, err := os.ReadFile(addresses)
		if err != nil {
			return nil, fmt.Errorf("%s is %q: %w", setting, addresses, err)
		}
		addresses = strings.TrimSpace(string(text))
	}
	tls := false // the first address begins with https://
	for i, address := range strings.Split(addresses, ",") {
		address = strings.TrimSpace(address)
		parsed, err := ParseAddress(setting, address)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			tls = parsed.TLS
		}
		if parsed.TLS != tls {
			return nil, fmt.Errorf("%s is %q: all addresses of a list must begin with http://, or all with "+
				"https://", setting, addresses)
		}
		if slices.Contains(list, address) {
			return nil, fmt.Errorf("%s is %q: %s is in it twice", setting, addresses, address)
		}
		list = append(list, address)
	}
	if len(list) > MaxLighthouses {
		return nil, fmt.Errorf("%s has %d addresses: at most %d are allowed", setting, len(list),
			MaxLighthouses)
	}
	return list, nil
}

// Announce returns the address under which others reach the server that listens at bound. It puts IPv6
// addresses in brackets.
func Announce(hostname string, bound net.Addr, security auth.Security) string {
	_, port, err := net.SplitHostPort(bound.String())
	if err != nil { // a network without ports
		port = "0"
	}
	scheme := "http://"
	if security.ServesTLS() {
		scheme = "https://"
	}
	return scheme + net.JoinHostPort(strings.Trim(hostname, "[]"), port)
}

// ValidateBind returns an error unless bind is host:port. An empty host stands for all interfaces, port 0 for
// a free port.
func ValidateBind(setting, bind string) error {
	_, port, err := net.SplitHostPort(bind)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return fmt.Errorf("%s is %q: it must be host:port with a port between 0 and 65535, "+
			`such as "[::]:29510" or "0.0.0.0:0"`,
			setting, bind)
	}
	return nil
}

// ValidateHostname returns an error unless hostname can be part of an address.
func ValidateHostname(setting, hostname string) error {
	host := strings.TrimSuffix(strings.TrimPrefix(hostname, "["), "]")
	if net.ParseIP(host) != nil {
		return nil
	}
	if hostname == "" || strings.ContainsAny(hostname, "/:?#@[] \t\r\n") {
		return fmt.Errorf("%s is %q: it must be a host name or an IP address, without a port", setting,
			hostname)
	}
	return nil
}
